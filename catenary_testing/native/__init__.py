"""Native kernels of a CPU by themselves, and their reference in torch: for tests and benchmarks."""
