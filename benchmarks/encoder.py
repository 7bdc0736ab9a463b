"""An embedding model's ways to be computed on a CPU: documents a second, and what each does to the vectors.

Run: `python -m benchmarks.encoder --model minilm`. The documents are pieces of tests/data/prose.txt. torch:
torch's operations; the others: linear layers by the CPU's own kernels, with weights of the type, or of eight
or four bits. Vectors are compared with those of torch in float32: cosines, and for how many documents the
nearest other one stays the same. The ways take turns, so that a noisy machine is noisy to all.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from benchmarks.quantization import TEXT
from services.engine.device.cpu import CpuDevice, CpuSettings, KernelChoice, Quantization
from services.engine.model import prepare_model
from services.engine.model.pooling import Embedder, open_embedder

WAYS = {
    "torch float32": ("float32", CpuSettings(KernelChoice.TORCH)),
    "torch bfloat16": ("bfloat16", CpuSettings(KernelChoice.TORCH)),
    "native float32": ("float32", CpuSettings(KernelChoice.NATIVE)),
    "native bfloat16": ("bfloat16", CpuSettings(KernelChoice.NATIVE)),
    "int8": ("float32", CpuSettings(KernelChoice.NATIVE, Quantization.INT8)),
    "int8, bfloat16": ("bfloat16", CpuSettings(KernelChoice.NATIVE, Quantization.INT8)),
    "int4": ("float32", CpuSettings(KernelChoice.NATIVE, Quantization.INT4)),
}
EXACT = "torch float32"


@dataclass(frozen=True)
class Nearness:
    """Of vectors to exact ones: mean and least cosine, and how many documents have the same nearest one."""

    mean: float
    least: float
    same_nearest: float


def documents(directory: Path, length: int) -> list[list[int]]:
    """Return the text in pieces of so many tokens, those that frame a text included."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    first, *ids, last = tokenizer.encode(TEXT.read_text(encoding="utf-8")).ids
    each = length - 2
    starts = range(0, len(ids) - each + 1, each)
    return [[first, *ids[start : start + each], last] for start in starts]


def open_way(directory: Path, way: str, threads: int | None, max_tokens: int = 2048) -> Embedder:
    """Return the model, computed so."""
    dtype, settings = WAYS[way]
    return open_embedder(directory, CpuDevice(threads, settings=settings), dtype=dtype, max_tokens=max_tokens)


def nearness(found: torch.Tensor, exact: torch.Tensor) -> Nearness:
    """Both of length 1, [N, dim]."""
    cosines = (found * exact).sum(-1)
    same = (_nearest(found) == _nearest(exact)).double().mean()
    return Nearness(float(cosines.mean()), float(cosines.min()), float(same))


def _nearest(vectors: torch.Tensor) -> torch.Tensor:
    return (vectors @ vectors.T).fill_diagonal_(-torch.inf).argmax(-1)


def seconds(embedders: list[Embedder], texts: list[list[int]], repeats: int) -> list[float]:
    """Median times of all documents at once, taken in turns."""
    times: list[list[float]] = [[] for _ in embedders]
    for round_ in range(repeats + 1):
        for index, embedder in enumerate(embedders):
            start = time.perf_counter()
            embedder.embed(texts)
            if round_:
                times[index].append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--documents", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    directory = prepare_model(options.model)
    embedders = [open_way(directory, way, options.threads) for way in WAYS]
    columns = [
        seconds(embedders, documents(directory, length)[: options.documents], options.repeats)
        for length in options.lengths
    ]
    texts = documents(directory, 64)
    exact = embedders[list(WAYS).index(EXACT)].embed(texts)
    counts = " | ".join(f"{length} tokens, documents/s" for length in options.lengths)
    print(f"| {options.model} | {counts} | mean cosine | least | same nearest of {len(texts)} |")
    print("| --- |" + " --- |" * (len(options.lengths) + 3))
    for index, (way, embedder) in enumerate(zip(WAYS, embedders, strict=True)):
        near = nearness(embedder.embed(texts), exact)
        rates = " | ".join(
            f"{min(options.documents, len(documents(directory, length))) / column[index]:.0f}"
            for length, column in zip(options.lengths, columns, strict=True)
        )
        print(
            f"| {way} | {rates} | {near.mean:.4f} | {near.least:.4f} | {near.same_nearest:.1%} |", flush=True
        )


if __name__ == "__main__":
    main()
