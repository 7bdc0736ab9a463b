"""The real model in float32: 32 concurrent sequences of 128 tokens equal transformers' greedy decoding."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.engine.domain import BeamOptions
from tests.support.beams import check_beams, expected_beams
from tests.support.reference import Reference
from tests.support.torch_engine import LocalCore, core_options

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

SEQUENCES = 32
TOKENS = 128

SUBJECTS = ["rivers", "bread", "the moon", "chess", "bicycles", "whales", "glass", "a lighthouse"]
TASKS = [
    "Explain {} to a child.",
    "Write a short poem about {}.",
    "List five facts about {} and say for each why it matters, in one sentence.",
    "What is the history of {}?",
]


@pytest.mark.long
def test_32_concurrent_sequences_equal_transformers(model_directory: Path, reference: Reference) -> None:
    prompts = [reference.chat(task.format(subject)) for task in TASKS for subject in SUBJECTS]
    assert len(prompts) == SEQUENCES
    options = core_options(model=str(model_directory), dtype="float32", max_model_len=1024, kv_cache_gib=1.0)
    core = LocalCore(options)
    assert core.engine.model.backend == "decoder"
    keys = [core.submit(prompt, max_tokens=TOKENS) for prompt in prompts]
    core.run()
    assert core.engine.scheduler.load().used_blocks == 0
    answers = [core.outputs[key].token_ids for key in keys]
    assert {len(answer) for answer in answers} == {TOKENS}
    differences = reference.differences(list(zip(prompts, answers, strict=True)))
    for key, difference in zip(keys, differences, strict=True):
        assert difference is None or difference.near_tie, f"sequence {key} differs at {difference}"


def test_a_generated_answer_and_beams_equal_generate(model_directory: Path, reference: Reference) -> None:
    prompt = reference.chat("What is the capital of France?")
    core = LocalCore(core_options(model=str(model_directory), dtype="float32", max_model_len=256))
    key = core.submit(prompt, max_tokens=40, ignore_eos=False)
    core.run()
    tokens = core.outputs[key].token_ids
    assert tokens == reference.greedy(prompt, 40)
    assert "Paris" in reference.text(tokens)
    stops = list(core.engine.ready.model.eos_token_ids)
    options = BeamOptions(4, 1.0, results=3)
    search = core.submit(prompt, max_tokens=16, ignore_eos=False, beams=options)
    core.run()
    expected = expected_beams(reference.model, prompt, options, stops=stops, max_new_tokens=16)
    check_beams(core, search, expected, stops=stops)
