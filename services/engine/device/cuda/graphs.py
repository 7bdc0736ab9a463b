"""CUDA graphs that share one pool of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from services.engine.device.base import Forward

# cuBLAS and others allocate and choose kernels in their first calls, which a capture may not do.
_RUNS_BEFORE_CAPTURE = 2


class CudaGraphs:
    """Captures forwards. One graph runs at a time, so their intermediate results share memory."""

    def __init__(self) -> None:
        self.captures = 0
        self.replays = 0
        self._pool: Any = None

    def capture(self, forward: Forward, tensors: Sequence[torch.Tensor]) -> Forward:
        """Implements `Device.capture`."""
        inputs = [tensor.clone() for tensor in tensors]
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_RUNS_BEFORE_CAPTURE):
                forward(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU, as a profiler does; thread_local lets them.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = forward(*inputs)
        if self._pool is None:
            self._pool = graph.pool()
        self.captures += 1

        def replay(*given: torch.Tensor) -> Any:
            for held, tensor in zip(inputs, given, strict=True):
                held.copy_(tensor, non_blocking=True)
            graph.replay()
            self.replays += 1
            # Held by this closure, so that no later capture takes their memory.
            return outputs

        return replay
