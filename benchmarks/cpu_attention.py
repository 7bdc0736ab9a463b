"""Attention of a forward on the CPU: the native kernels beside torch's operations, in one run.

python -m benchmarks.cpu_attention --threads 2
python -m benchmarks.cpu_attention --threads 1 --clock cpu    where other work shares the machine
python -m benchmarks.cpu_attention --heads 32 --kv-heads 8 --head-dim 128 --layers 8
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from catenary_testing.native.attention import NativeAttention, PagedCache, Span
from services.engine.device.cpu import CpuDevice
from services.engine.device.cpu.native import open_library

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
DECODES = ((1, 256), (8, 256), (32, 256), (1, 2048), (8, 2048), (32, 2048))
PREFILLS = ((1, 1024), (8, 128))


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a model's attention, and how its cache is divided."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """How calls are timed."""

    clock: Callable[[], float]
    repeats: int

    def milliseconds(self, call: Callable[[], object]) -> float:
        """Median of a call."""
        times = []
        for _ in range(self.repeats + 1):
            start = self.clock()
            call()
            times.append(self.clock() - start)
        return statistics.median(times[1:]) * 1000


def paged(device: CpuDevice, shape: Shape, blocks: int) -> PagedCache:
    """Return a cache of so many blocks. All layers hold the same, in memory of their own."""
    one = (blocks * shape.block_size, shape.kv_heads, shape.head_dim)
    key, value = (device.memory.zeros((shape.layers, *one), shape.dtype) for _ in range(2))
    for tensor in (key, value):
        tensor[:] = torch.randn(one).to(shape.dtype)
    return PagedCache(key, value, shape.block_size)


def spans_of(shape: Shape, batch: int, tokens: int, context: int) -> list[Span]:
    each = -(-(tokens + context) // shape.block_size)
    # As a pool that has been in use gives them.
    shuffled = torch.randperm(batch * each).view(batch, each).tolist()
    return [Span(i * tokens, tokens, context, shuffled[i]) for i in range(batch)]


def native_ms(
    attention: NativeAttention,
    shape: Shape,
    cache: PagedCache,
    spans: list[Span],
    threads: int,
    watch: Stopwatch,
) -> float:
    rows = sum(span.tokens for span in spans)
    query = torch.randn(rows, shape.heads, shape.head_dim)
    out = torch.zeros(1, rows, shape.heads, shape.head_dim)
    return watch.milliseconds(
        lambda: attention.attend(query, cache, spans, scale=shape.scale, threads=threads, out=out)
    )


def torch_decode_ms(
    device: CpuDevice, shape: Shape, cache: PagedCache, spans: list[Span], watch: Stopwatch
) -> float:
    query = torch.randn(len(spans), shape.heads, shape.head_dim).to(shape.dtype)
    blocks = torch.tensor([block for span in spans for block in span.blocks])
    rows = torch.tensor([i for i, span in enumerate(spans) for _ in span.blocks])
    bias = torch.zeros(len(blocks), 1, shape.block_size)

    def forward() -> None:
        for key, value in zip(cache.key, cache.value, strict=True):
            device.kernels.attend_decode(query, key, value, blocks, rows, bias, shape.scale)

    return watch.milliseconds(forward)


def torch_prefill_ms(device: CpuDevice, shape: Shape, batch: int, tokens: int, watch: Stopwatch) -> float:
    query = torch.randn(batch, shape.heads, tokens, shape.head_dim).to(shape.dtype)
    key, value = (
        torch.randn(batch, shape.kv_heads, tokens, shape.head_dim).to(shape.dtype) for _ in range(2)
    )

    def forward() -> None:
        for _ in range(shape.layers):
            device.kernels.attend_prefill(query, key, value, None, shape.scale)

    return watch.milliseconds(forward)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    chosen = parser.parse_args()
    shape = Shape(
        chosen.layers,
        chosen.heads,
        chosen.kv_heads,
        chosen.head_dim,
        chosen.block_size,
        getattr(torch, chosen.dtype),
    )
    watch = Stopwatch(CLOCKS[chosen.clock], chosen.repeats)
    device = CpuDevice(chosen.threads)
    attention = NativeAttention(open_library())
    print(f"{'':16}{'native ms':>12}{'torch ms':>12}{'ratio':>8}{'native':>16}")
    token_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * shape.dtype.itemsize
    for batch, context in DECODES:
        spans = spans_of(shape, batch, 1, context - 1)
        cache = paged(device, shape, sum(len(span.blocks) for span in spans))
        ours = native_ms(attention, shape, cache, spans, chosen.threads, watch)
        theirs = torch_decode_ms(device, shape, cache, spans, watch)
        rate = f"{batch * context * token_bytes / ours / 1e6:.1f} GB/s"
        print(f"{f'decode {batch}x{context}':16}{ours:12.2f}{theirs:12.2f}{theirs / ours:8.1f}{rate:>16}")
    for batch, tokens in PREFILLS:
        spans = spans_of(shape, batch, tokens, 0)
        cache = paged(device, shape, sum(len(span.blocks) for span in spans))
        ours = native_ms(attention, shape, cache, spans, chosen.threads, watch)
        theirs = torch_prefill_ms(device, shape, batch, tokens, watch)
        products = 2 * batch * tokens * (tokens + 1) * shape.heads * shape.head_dim * shape.layers
        rate = f"{products / ours / 1e9:.3f} TFLOP/s"
        print(f"{f'prefill {batch}x{tokens}':16}{ours:12.2f}{theirs:12.2f}{theirs / ours:8.1f}{rate:>16}")


if __name__ == "__main__":
    main()
