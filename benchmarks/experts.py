"""Mixtures of experts with random weights: the CPU's own kernels beside torch's and transformers.

Run: `python -m benchmarks.experts`. Two small models, of the kinds of Mixtral (few large experts, two for
each token) and Qwen3-MoE (many small ones, eight for each), are written to a temporary directory. Forwards
are those of `benchmarks.decoder`, whose ways take turns step by step.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

from benchmarks.decoder import WAYS, Shape, compare_models, open_way

_COMMON = {
    "vocab_size": 32_000,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
# Class of the model, and its config beside what is common.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": (
        "MixtralForCausalLM",
        {
            "intermediate_size": 1792,
            "num_hidden_layers": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {
            "intermediate_size": 1536,
            "moe_intermediate_size": 192,
            "num_hidden_layers": 12,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
    ),
}


def write_model(kind: str, directory: Path) -> int:
    """Write a random checkpoint in bfloat16; returns how many weights it has."""
    name, own = KINDS[kind]
    model_class: Any = getattr(transformers, name)
    torch.manual_seed(3)
    model = model_class(model_class.config_class(**_COMMON, **own)).bfloat16()
    model.save_pretrained(directory)
    return int(sum(parameter.numel() for parameter in model.parameters()))


def measure(kind: str, options: argparse.Namespace) -> None:
    """Print a model's rows."""
    models = [open_way(way, options) for way in options.ways]
    for phase in options.phases:
        for batch in options.batches if phase == "decode" else [1]:
            shape = Shape(batch, options.context, 32)
            repeats = options.repeats if phase == "decode" else max(3, options.repeats // 4)
            times = compare_models(models, phase, shape, repeats)
            tokens = batch if phase == "decode" else options.context
            rates = " | ".join(f"{tokens / taken:.0f}" for taken in times)
            print(f"| {kind} | {phase} | {batch} | {rates} |", flush=True)


@torch.inference_mode()
def main() -> None:
    """Print a table of tokens per second."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--phases", nargs="+", choices=("decode", "prefill"), default=["decode", "prefill"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=12)
    options = parser.parse_args()
    print("| model | phase | batch | " + " | ".join(options.ways) + " |")
    print("| --- | --- | --- |" + " --- |" * len(options.ways))
    for kind in options.kinds:
        with TemporaryDirectory(prefix="cat-experts-") as directory:
            options.model = directory
            weights = write_model(kind, Path(directory))
            measure(f"{kind}, {weights / 1e6:.0f} million weights", options)


if __name__ == "__main__":
    main()
