"""Ways to run a decoder against one another: forwards on prepared inputs, no scheduler, no sampling.

Run: `python -m benchmarks.decoder --model smollm2 --dtype bfloat16 --batches 1 8 32 --context 256`.
native: the CPU's own kernels, with weights of the dtype or of eight or four bits. torch: the decoder's
modules. transformers: its own module with our attention. They take turns step by step, so that a noisy
machine is noisy to all.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.engine.device.cpu import CpuDevice, CpuSettings, KernelChoice, Quantization
from services.engine.model import prepare_model
from services.engine.model.open_model import open_model
from services.engine.model.paged import PagedModel

# What runs a model: the backend, and how the device computes it.
WAYS = {
    "native": ("decoder", CpuSettings(KernelChoice.NATIVE)),
    "int8": ("decoder", CpuSettings(KernelChoice.NATIVE, Quantization.INT8)),
    "int4": ("decoder", CpuSettings(KernelChoice.NATIVE, Quantization.INT4)),
    "torch": ("decoder", CpuSettings(KernelChoice.TORCH)),
    "transformers": ("transformers", CpuSettings(KernelChoice.TORCH)),
}


@dataclass(frozen=True)
class Shape:
    """Sequences of one length each in blocks of their own."""

    batch: int
    context: int
    block_size: int

    @property
    def blocks_each(self) -> int:
        """Blocks of one sequence, its new token included."""
        return self.context // self.block_size + 1


def decode_step(model: PagedModel, shape: Shape) -> Callable[[], torch.Tensor]:
    """Return one greedy decode step of the whole batch."""
    each, size = shape.blocks_each, shape.block_size
    blocks = torch.arange(shape.batch * each)
    rows = torch.arange(shape.batch).repeat_interleave(each)
    starts = (torch.arange(each) * size).repeat(shape.batch)
    positions = torch.full((shape.batch,), shape.context)
    slots = torch.arange(shape.batch) * each * size + shape.context
    tokens = torch.arange(shape.batch) + 100

    def step() -> torch.Tensor:
        return model.logits(model.decode(tokens, positions, slots, blocks, rows, starts)).argmax(-1)

    return step


def prefill_step(model: PagedModel, shape: Shape) -> Callable[[], torch.Tensor]:
    """Prefill the contexts of all sequences at once; the last token of each is scored."""
    query, each = shape.context, shape.blocks_each * shape.block_size
    places = torch.arange(query)
    slots = torch.cat([places + row * each for row in range(shape.batch)])
    tokens = (torch.arange(shape.batch * query) * 31) % 20_000 + 100
    context = torch.zeros((shape.batch, 0), dtype=torch.int64)
    lengths = torch.zeros(shape.batch, dtype=torch.int64)
    last = torch.arange(1, shape.batch + 1) * query - 1

    def step() -> torch.Tensor:
        hidden = model.prefill(tokens, places.repeat(shape.batch), slots, context, lengths)
        return model.logits(hidden.index_select(0, last)).argmax(-1)

    return step


def compare(steps: list[Callable[[], torch.Tensor]], repeats: int) -> list[float]:
    """Median seconds of each, taken in turns."""
    times: list[list[float]] = [[] for _ in steps]
    for round_ in range(repeats + 2):
        for index, step in enumerate(steps):
            start = time.perf_counter()
            step()
            if round_ >= 2:
                times[index].append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


def open_way(way: str, options: argparse.Namespace) -> PagedModel:
    """Return the model, run this way."""
    backend, settings = WAYS[way]
    device = CpuDevice(options.threads, settings=settings)
    return open_model(prepare_model(options.model), device, dtype=options.dtype, backend=backend)


def compare_models(models: list[PagedModel], phase: str, shape: Shape, repeats: int) -> list[float]:
    """Median seconds of each model's forward of a phase, taken in turns. Their KV is allocated anew."""
    for model in models:
        model.allocate_kv(shape.batch * shape.blocks_each, shape.block_size)
    build = decode_step if phase == "decode" else prefill_step
    return compare([build(model, shape) for model in models], repeats)


def main() -> None:
    """Print a table of tokens per second."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--phases", nargs="+", choices=("decode", "prefill"), default=["decode", "prefill"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    models = [open_way(way, options) for way in options.ways]
    threads = torch.get_num_threads()
    print(f"{options.model} {options.dtype}, context {options.context}, {threads} threads, tok/s")
    print(f"{'phase':8} {'batch':>5}" + "".join(f" {way:>13}" for way in options.ways))
    for phase in options.phases:
        for batch in options.batches:
            shape = Shape(batch, options.context, options.block_size)
            repeats = options.repeats if phase == "decode" else max(3, options.repeats // 10)
            times = compare_models(models, phase, shape, repeats)
            tokens = batch if phase == "decode" else batch * options.context
            print(f"{phase:8} {batch:5}" + "".join(f" {tokens / taken:13.1f}" for taken in times), flush=True)


if __name__ == "__main__":
    main()
