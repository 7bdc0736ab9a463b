"""What packing a model's weights costs in quality: perplexity of a text, how often the best token changes.

Run: `python -m benchmarks.quantization --model smollm2`. The text is tests/data/prose.txt, in windows that
overlap nowhere; every token but a window's first is predicted. Agreement is with what bfloat16 predicts.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from services.engine.device.cpu import CpuDevice, CpuSettings, KernelChoice, Quantization
from services.engine.model import prepare_model
from services.engine.model.open_model import open_model
from services.engine.model.paged import PagedModel

TEXT = Path(__file__).parent.parent / "tests" / "data" / "prose.txt"
BLOCK = 32
# Logits that are there at once.
_SLICE = 64
WAYS: dict[str, tuple[str, Quantization | None]] = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "int8": ("bfloat16", Quantization.INT8),
    "int4": ("bfloat16", Quantization.INT4),
}


@dataclass(frozen=True)
class Quality:
    """Of a text: perplexity, and the best token after each prefix, int64 [predictions]."""

    perplexity: float
    best: torch.Tensor

    def agreement(self, other: Quality) -> float:
        """Share of prefixes after which both have the same best token."""
        return float((self.best == other.best).double().mean())


def text_ids(directory: Path, limit: int | None = None) -> list[int]:
    """Return the text's tokens, the first `limit` of them."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(TEXT.read_text(encoding="utf-8")).ids
    return ids[:limit]


def open_packed(directory: Path, way: str, threads: int | None = None) -> PagedModel:
    """Return the model, its weights as `way` says."""
    dtype, quantization = WAYS[way]
    device = CpuDevice(threads, settings=CpuSettings(KernelChoice.NATIVE, quantization))
    return open_model(directory, device, dtype=dtype, backend="decoder")


def quality(model: PagedModel, ids: list[int], window: int = 512) -> Quality:
    """Predict every token of each window from those before it in the window."""
    model.allocate_kv(-(-window // BLOCK), BLOCK)
    losses: list[torch.Tensor] = []
    best: list[torch.Tensor] = []
    for start in range(0, len(ids) - 1, window):
        tokens = torch.tensor(ids[start : start + window])
        hidden = _states(model, tokens)
        for first in range(0, tokens.shape[0] - 1, _SLICE):
            targets = tokens[first + 1 : first + 1 + _SLICE]
            scores = model.logits(hidden[first : first + targets.shape[0]]).float()
            losses.append(torch.nn.functional.cross_entropy(scores, targets, reduction="none"))
            best.append(scores.argmax(-1))
    return Quality(math.exp(float(torch.cat(losses).double().mean())), torch.cat(best))


def _states(model: PagedModel, tokens: torch.Tensor) -> torch.Tensor:
    places = torch.arange(tokens.shape[0])
    nothing = torch.zeros((1, 0), dtype=torch.int64)
    return model.prefill(tokens, places, places, nothing, torch.zeros(1, dtype=torch.int64))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=None)
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    directory = prepare_model(options.model)
    ids = text_ids(directory, options.tokens)
    print(f"{options.model}, {len(ids)} tokens of {TEXT.name}")
    print(f"{'weights':9} {'MiB':>7} {'perplexity':>11} {'to bfloat16':>12} {'same best token':>16}")
    found: dict[str, Quality] = {}
    for way in ("bfloat16", *(way for way in WAYS if way != "bfloat16")):
        model = open_packed(directory, way, options.threads)
        found[way] = quality(model, ids)
        ratio = found[way].perplexity / found["bfloat16"].perplexity - 1
        print(
            f"{way:9} {model.weight_bytes() / 2**20:7.0f} {found[way].perplexity:11.3f} {ratio:12.2%} "
            f"{found[way].agreement(found['bfloat16']):16.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
