"""The real model in float32: 32 concurrent sequences of 128 tokens equal transformers' greedy decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.engine.core.options import CoreOptions
from services.engine.model import prepare_model
from tests.support.torch_engine import LocalCore

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

SEQUENCES = 32
TOKENS = 128
# Two scores nearer than this may change places with the order of a sum.
NEAR_TIE = 1e-4

SUBJECTS = ["rivers", "bread", "the moon", "chess", "bicycles", "whales", "glass", "a lighthouse"]
TASKS = [
    "Explain {} to a child.",
    "Write a short poem about {}.",
    "List five facts about {} and say for each why it matters, in one sentence.",
    "What is the history of {}?",
]


@pytest.fixture(scope="module")
def directory() -> Path:
    return prepare_model("smollm2")


def chat(tokenizer: Any, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return ids


def first_difference(logits: torch.Tensor, tokens: list[int]) -> tuple[int, float] | None:
    """Where the reference would have gone on otherwise than `tokens`, and how near its two best scores are
    there.

    logits [len(tokens), V] are the reference's after each prefix. Up to the first difference its greedy
    decoding has the same prefix, so comparing best tokens compares greedy outputs.
    """
    best = logits.topk(2, dim=-1)
    for position, token in enumerate(tokens):
        if int(best.indices[position, 0]) != token:
            return position, float(best.values[position, 0] - best.values[position, 1])
    return None


def test_32_concurrent_sequences_equal_transformers(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompts = [chat(tokenizer, task.format(subject)) for task in TASKS for subject in SUBJECTS]
    assert len(prompts) == SEQUENCES
    core = LocalCore(CoreOptions(model=str(directory), dtype="float32", max_model_len=1024, kv_cache_gib=1.0))
    keys = [core.submit(prompt, max_tokens=TOKENS) for prompt in prompts]
    core.run()
    assert core.engine.scheduler.load().used_blocks == 0

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for prompt, key in zip(prompts, keys, strict=True):
        tokens = core.outputs[key].token_ids
        assert len(tokens) == TOKENS
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens[:-1]]), logits_to_keep=TOKENS).logits[0]
        difference = first_difference(logits, tokens)
        assert difference is None or difference[1] < NEAR_TIE, f"sequence {key} differs at {difference}"


def test_a_generated_answer_equals_generate(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompt = chat(tokenizer, "What is the capital of France?")
    core = LocalCore(CoreOptions(model=str(directory), dtype="float32", max_model_len=256))
    key = core.submit(prompt, max_tokens=40, ignore_eos=False)
    core.run()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)
    assert core.outputs[key].token_ids == expected[0, len(prompt) :].tolist()
    assert "Paris" in tokenizer.decode(core.outputs[key].token_ids)
