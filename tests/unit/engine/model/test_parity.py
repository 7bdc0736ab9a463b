"""Prefill in chunks and batched paged decode give what transformers gives."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.torch_engine import KINDS, VOCAB, LocalCore, Output, save_tiny_model, tiny_options

TOLERANCE = 1e-4


def reference(directory: Path, kind: str, dtype: str = "float32") -> Any:
    model_class: Any = getattr(transformers, KINDS[kind][0])
    return model_class.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()


def logprobs_of(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """The model's log probability of each token after the prompt."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)


def assert_greedy(model: Any, prompt: list[int], output: Output) -> None:
    """If the reference's best token after every prefix is ours, its greedy decoding is ours."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output.token_ids])).logits[0]
    expected = torch.log_softmax(logits.float(), -1)[len(prompt) - 1 : -1]
    for position, token in enumerate(output.token_ids):
        row = expected[position]
        best = row.topk(2)
        if int(best.indices[0]) != token:
            assert float(best.values[0] - best.values[1]) < TOLERANCE, f"token {position} differs"
            return
        assert output.logprobs[position] == pytest.approx(float(row[token]), abs=TOLERANCE)
        for other, value in output.tops[position].items():
            assert value == pytest.approx(float(row[other]), abs=TOLERANCE)


def prompts(count: int, longest: int = 70) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_equals_transformers(kind: str, tmp_path: Path) -> None:
    directory = save_tiny_model(kind, tmp_path)
    core = LocalCore(tiny_options(directory))
    batch = prompts(7)
    keys = [core.submit(prompt, max_tokens=20, top_logprobs=3) for prompt in batch]
    core.run()
    model = reference(directory, kind)
    for key, prompt in zip(keys, batch, strict=True):
        assert len(core.outputs[key].token_ids) == 20
        assert_greedy(model, prompt, core.outputs[key])
    assert core.engine.scheduler.load().used_blocks == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_as_near_to_the_truth_as_transformers(dtype: str, tmp_path: Path) -> None:
    directory = save_tiny_model("llama", tmp_path)
    core = LocalCore(tiny_options(directory, dtype=dtype))
    batch = prompts(7)
    keys = [core.submit(prompt, max_tokens=20, top_logprobs=0) for prompt in batch]
    core.run()
    exact, rounded = reference(directory, "llama"), reference(directory, "llama", dtype)
    ours: list[float] = []
    theirs: list[float] = []
    for key, prompt in zip(keys, batch, strict=True):
        output = core.outputs[key]
        truth = logprobs_of(exact, prompt, output.token_ids)
        ours += (torch.tensor(output.logprobs) - truth).abs().tolist()
        theirs += (logprobs_of(rounded, prompt, output.token_ids) - truth).abs().tolist()
    assert len(ours) == 140
    assert sum(ours) < 1.5 * sum(theirs)


@pytest.mark.parametrize(
    ("block_size", "budget", "seqs", "strategy"),
    [(1, 9, 3, "exponential"), (8, 64, 8, "linear"), (32, 256, 8, "exponential"), (16, 17, 1, "linear")],
)
def test_block_sizes_budgets_and_strategies_do_not_show(
    block_size: int, budget: int, seqs: int, strategy: str, tmp_path: Path
) -> None:
    directory = save_tiny_model("llama", tmp_path)
    core = LocalCore(
        tiny_options(
            directory,
            block_size=block_size,
            max_num_batched_tokens=budget,
            max_num_seqs=seqs,
            bucketing_strategy=strategy,
        )
    )
    batch = prompts(6)
    keys = [core.submit(prompt, max_tokens=12, top_logprobs=0) for prompt in batch]
    core.run()
    model = reference(directory, "llama")
    for key, prompt in zip(keys, batch, strict=True):
        assert_greedy(model, prompt, core.outputs[key])


def test_preemption_and_late_arrivals_do_not_show(tmp_path: Path) -> None:
    directory = save_tiny_model("llama", tmp_path)
    # 30 blocks of 8 tokens for 6 sequences that grow to about 80 tokens each.
    per_token = 2 * 2 * 8 * 2 * 4
    core = LocalCore(tiny_options(directory, kv_cache_gib=30 * 8 * per_token / 2**30, max_model_len=100))
    assert core.engine.ready.capacity.total_blocks == 30
    batch = prompts(6, longest=40)
    keys = []
    for prompt in batch:
        keys.append(core.submit(prompt, max_tokens=40, top_logprobs=0))
        for _ in range(3):
            core.step()
    core.run()
    model = reference(directory, "llama")
    for key, prompt in zip(keys, batch, strict=True):
        assert_greedy(model, prompt, core.outputs[key])


def test_a_resumed_sequence_goes_on_alike(tmp_path: Path) -> None:
    core = LocalCore(tiny_options(save_tiny_model("llama", tmp_path)))
    prompt = prompts(1)[0]
    options = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "max_tokens": 24}
    whole = core.submit(prompt, **options)
    core.run()
    tokens = core.outputs[whole].token_ids
    rest = core.submit(prompt + tokens[:10], prompt_len=len(prompt), **options)
    core.run()
    assert core.outputs[rest].token_ids == tokens[10:]
    end = core.outputs[rest].end
    assert end is not None
    assert (end.prompt_tokens, end.completion_tokens) == (len(prompt), 24)
