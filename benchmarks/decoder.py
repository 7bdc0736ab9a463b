"""Our decoder against transformers' own module: forwards on prepared inputs, no scheduler, no sampling.

Run: `python -m benchmarks.decoder --model smollm2 --dtype bfloat16 --batches 1 8 --context 256`.
The two take turns step by step, so that a noisy machine is noisy to both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.engine.device import open_device
from services.engine.model import prepare_model
from services.engine.model.opening import open_model
from services.engine.model.paged import PagedModel

BACKENDS = ("decoder", "transformers")


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
    """One greedy decode step of the whole batch."""
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
    """A prefill of every sequence's context at once; the last token of each is scored."""
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


def main() -> None:
    """Prints a table of tokens per second."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    device = open_device("cpu", threads=options.threads)
    directory = prepare_model(options.model)
    models = [open_model(directory, device, dtype=options.dtype, backend=name) for name in BACKENDS]
    print(f"{options.model} {options.dtype}, context {options.context}, {torch.get_num_threads()} threads")
    print(f"{'phase':8} {'batch':>5} {'decoder tok/s':>14} {'transformers tok/s':>19} {'ratio':>6}")
    for phase, build in (("decode", decode_step), ("prefill", prefill_step)):
        for batch in options.batches:
            shape = Shape(batch, options.context, options.block_size)
            for model in models:
                model.allocate_kv(shape.batch * shape.blocks_each, shape.block_size)
            steps = [build(model, shape) for model in models]
            repeats = options.repeats if phase == "decode" else max(3, options.repeats // 10)
            ours, theirs = compare(steps, repeats)
            tokens = batch if phase == "decode" else batch * options.context
            print(f"{phase:8} {batch:5} {tokens / ours:14.1f} {tokens / theirs:19.1f} {theirs / ours:6.2f}")


if __name__ == "__main__":
    main()
