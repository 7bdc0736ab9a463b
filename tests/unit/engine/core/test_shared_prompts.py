"""Samples of one prompt in a whole core: it is computed once, and they are what they would be alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from services.engine.domain import FinishReason
from services.engine.link import AbortSequences
from tests.support.static_sampling import StaticCpu
from tests.support.torch_engine import VOCAB, LocalCore, save_tiny_model, tiny_options

SAMPLES = 6
LENGTHS = (1, 7, 8, 9, 41)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("tiny"))


def prompt_of(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def sample(core: LocalCore, prompt: list[int], *, shared: bool, **options: Any) -> list[int]:
    """Submits samples of a prompt, with seeds of their own and a greedy one; returns their keys."""
    keys: list[int] = []
    for number in range(SAMPLES):
        given = {"temperature": 0.0 if number == 2 else 1.0, "seed": 40 + number, "max_tokens": 4 + number}
        leader = keys[0] if shared and keys else 0
        keys.append(core.submit(prompt, **given, **options, same_prompt_as=leader))
    return keys


def results(core: LocalCore, keys: list[int]) -> list[tuple[list[int], FinishReason | None, int]]:
    ends = [core.outputs[key].end for key in keys]
    assert all(end is not None for end in ends)
    return [
        (core.outputs[key].token_ids, end.reason if end else None, end.prompt_tokens if end else 0)
        for key, end in zip(keys, ends, strict=True)
    ]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("overlaps", [True, False])
def test_samples_of_a_prompt_equal_those_of_separate_requests(
    directory: Path, caching: bool, overlaps: bool
) -> None:
    options = {"enable_prefix_caching": caching, "async_stepping": overlaps}
    core = LocalCore(tiny_options(directory, **options))
    for length in LENGTHS:
        alone = sample(core, prompt_of(length), shared=False, cache_salt="alone", top_logprobs=2)
        core.run()
        shared = sample(core, prompt_of(length), shared=True, cache_salt="shared", top_logprobs=2)
        core.run()
        assert results(core, shared) == results(core, alone)
        for one, other in zip(shared, alone, strict=True):
            expected = core.outputs[other].logprobs
            assert core.outputs[one].logprobs == pytest.approx(expected, abs=1e-4)
    core.engine.scheduler.check()


@pytest.mark.parametrize("caching", [True, False])
def test_the_forwards_of_a_prompt_are_run_once(directory: Path, caching: bool) -> None:
    core = LocalCore(tiny_options(directory, enable_prefix_caching=caching))
    work = core.engine.graphs.padding.prefill
    prompt = prompt_of(100)
    before = work.tokens
    keys = sample(core, prompt, shared=True)
    core.run()
    assert work.tokens - before == 100
    cached = [end.cached_tokens for key in keys if (end := core.outputs[key].end) is not None]
    assert cached == [0, *[96 if caching else 0] * (SAMPLES - 1)]
    assert core.engine.scheduler.load().used_blocks == 0


def test_copies_of_blocks_are_shapes_that_warm_up_has_seen(directory: Path) -> None:
    options = tiny_options(directory, warmup="full", bucketing_strategy="exponential")
    core = LocalCore(options, StaticCpu())
    core.engine.graphs.complete()
    prompt = prompt_of(13)
    keys = sample(core, prompt, shared=True)
    core.run()
    assert core.engine.graphs.first_seen == 0
    plain = LocalCore(tiny_options(directory))
    assert results(core, keys) == results(plain, _run(plain, sample(plain, prompt, shared=False)))


def _run(core: LocalCore, keys: list[int]) -> list[int]:
    core.run()
    return keys


def test_samples_go_on_when_the_leader_is_aborted_or_its_prompt_is_scored(directory: Path) -> None:
    core = LocalCore(tiny_options(directory))
    alone = sample(core, prompt_of(60), shared=False)
    core.run()
    shared = sample(core, prompt_of(60), shared=True, cache_salt="x")
    core.step()
    core.loop.handle(AbortSequences([shared[0]]))
    core.run()
    assert results(core, shared)[1:] == results(core, alone)[1:]
    lead = core.submit(prompt_of(60), prompt_logprobs=1, cache_salt="y")
    follower = core.submit(prompt_of(60), temperature=1.0, seed=41, max_tokens=5, same_prompt_as=lead)
    core.run()
    assert len(core.outputs[lead].prompt) == 59
    assert core.outputs[follower].prompt == []
    assert core.outputs[follower].token_ids == core.outputs[alone[1]].token_ids


def test_samples_that_are_preempted_go_on_alike(directory: Path) -> None:
    tight = LocalCore(tiny_options(directory, kv_cache_gib=24 * 2 / 2**20, max_model_len=96))
    roomy = LocalCore(tiny_options(directory, max_model_len=96))
    outcomes = []
    for core in (roomy, tight):
        keys: list[int] = []
        for prompt in (prompt_of(30), prompt_of(21)):
            for number in range(4):
                leader = keys[-number] if number else 0
                keys.append(
                    core.submit(prompt, temperature=1.0, seed=number, max_tokens=50, same_prompt_as=leader)
                )
        core.run()
        outcomes.append(results(core, keys))
    assert outcomes[0] == outcomes[1]
    assert tight.engine.scheduler.planner.step > roomy.engine.scheduler.planner.step
