#!/usr/bin/env python3
"""`make gpu-check`: the cuda device on a real GPU, in a few minutes and without a network.

A random model serves the same requests on the CPU and on the GPU in float32: the tokens must be equal, and
nothing may be captured once warm-up is done. Then decode steps per second are measured in bfloat16, with
graphs and without. Needs torch with CUDA, transformers and safetensors, and the small packages that
deploy/gpu/packages.sh puts into build/gpu-packages where there is a network.
Exit code 0 also where there is no GPU: then it says that nothing was checked.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
# At the end: what the image has goes with its Python and its torch.
sys.path.append(str(ROOT / "build" / "gpu-packages"))

import torch  # noqa: E402

REQUESTS = 100
BATCHES = (1, 8, 32)
CONTEXT = 256
TIMED_STEPS = 100


def main() -> int:
    """Runs the checks, prints what they found and returns the exit code."""
    if not torch.cuda.is_available():
        print("gpu-check: no NVIDIA GPU here, nothing was checked")
        return 0
    print(f"gpu-check: {torch.cuda.get_device_name()}, torch {torch.__version__}")
    from catenary.telemetry import configure_logging

    configure_logging(service="gpu-check", level="warning", fmt="text")
    with tempfile.TemporaryDirectory() as scratch:
        small = save_model(Path(scratch) / "small", hidden=256, layers=4)
        wrong = compare_tokens(small, "cuda")
        captured = captures_after_warm_up(small, "cuda")
        large = save_model(Path(scratch) / "large", hidden=2048, layers=16)
        speed(large, "cuda")
    failed = wrong > 0 or captured > 0
    print("gpu-check: FAILED" if failed else "gpu-check: passed")
    return 1 if failed else 0


def save_model(directory: Path, *, hidden: int, layers: int) -> Path:
    """Writes a random llama whose next-token scores are far apart. Returns its directory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.05)
    model.lm_head.weight.data.mul_(10)
    model.save_pretrained(directory)
    return directory


def open_core(directory: Path, device: str, **options: object):  # type: ignore[no-untyped-def]
    """A core in this process."""
    from tests.support.torch_engine import LocalCore, core_options

    values: dict[str, object] = {
        "model": str(directory),
        "device": device,
        "dtype": "float32",
        "block_size": 32,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
        "max_model_len": 512,
        "kv_cache_gib": 1.0,
        **options,
    }
    return LocalCore(core_options(**values))


def prompts(count: int) -> list[list[int]]:
    """Random prompts of 1 to 300 tokens."""
    chance = random.Random(5)
    return [[chance.randrange(3, 512) for _ in range(chance.randrange(1, 300))] for _ in range(count)]


def compare_tokens(directory: Path, device: str) -> int:
    """Serves the same greedy requests on the CPU and the device; returns how many differ."""
    found = []
    for name in ("cpu", device):
        core = open_core(directory, name)
        keys = [core.submit(prompt, max_tokens=24) for prompt in prompts(REQUESTS)]
        core.run(20_000)
        found.append([core.outputs[key].token_ids for key in keys])
        core.engine.close()
    wrong = sum(ours != theirs for ours, theirs in zip(*found, strict=True))
    print(f"tokens: {REQUESTS - wrong} of {REQUESTS} requests equal the CPU's in float32")
    return wrong


def captures_after_warm_up(directory: Path, device: str) -> int:
    """Serves requests of all lengths after a full warm-up; returns how many forwards it had not seen."""
    core = open_core(directory, device, warmup="full")
    for prompt in prompts(REQUESTS):
        core.submit(prompt, max_tokens=8)
    core.run(20_000)
    captured = sum(step.load.graphs.captured for step in core.link.sent[-1:])
    new = core.engine.graphs.first_seen
    core.engine.close()
    print(f"graphs: {captured} captured by warm-up, {new} shapes first seen after it")
    return new


def speed(directory: Path, device: str) -> None:
    """Prints decode steps per second with graphs and without."""
    print(f"decode steps per second, bfloat16, context {CONTEXT}:")
    for batch in BATCHES:
        rates = [_rate(directory, device, batch, eager) for eager in (False, True)]
        print(
            f"  batch {batch:>3}: {rates[0]:8.1f} with graphs, {rates[1]:8.1f} without, "
            f"{rates[0] / rates[1]:.2f} times"
        )


def _rate(directory: Path, device: str, batch: int, eager: bool) -> float:
    core = open_core(
        directory, device, dtype="bfloat16", warmup="skip", enforce_eager=eager, max_num_batched_tokens=2048
    )
    for prompt in prompts(batch):
        core.submit((prompt * CONTEXT)[:CONTEXT], max_tokens=2 * TIMED_STEPS + 20)
    # The prompts, and a first visit to each bucket of the steps that are timed.
    for _ in range(TIMED_STEPS):
        core.step()
    started, before = time.perf_counter(), len(core.link.sent)
    for _ in range(TIMED_STEPS):
        core.step()
    core.engine.device.synchronize()
    steps = len(core.link.sent) - before
    rate = steps / (time.perf_counter() - started)
    core.engine.close()
    return rate


if __name__ == "__main__":
    sys.exit(main())
