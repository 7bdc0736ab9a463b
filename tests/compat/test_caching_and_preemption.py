"""Users' bug reports, section F: prefix caching, preemption and cancelling, in a core of this process.

And C21, which is about prefix caching beside log probabilities of prompts.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from services.engine.domain import FinishReason
from services.engine.kv import BlockPool
from services.engine.link import AbortSequences, CoreLoad, CoreStep
from tests.support.torch_engine import VOCAB, LocalCore, Output, save_tiny_model, tiny_options

BLOCK = 8
# Two layers of two KV heads, keys and values of 8 float32 numbers.
BLOCK_BYTES = 2 * 2 * 2 * 8 * 4 * BLOCK
LOGPROBS = 1e-4


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def cold(directory: Path) -> LocalCore:
    """A core without prefix caching and with room for everything: what it says is right."""
    return LocalCore(tiny_options(directory, enable_prefix_caching=False))


@pytest.fixture
def core(directory: Path) -> LocalCore:
    """A core with an empty prefix cache."""
    return LocalCore(tiny_options(directory))


def small_core(directory: Path, blocks: int, **options: Any) -> LocalCore:
    """A core whose pool has so many blocks."""
    budget = blocks * BLOCK_BYTES / 2**30
    core = LocalCore(tiny_options(directory, kv_cache_gib=budget, max_model_len=96, **options))
    assert core.engine.ready.capacity.total_blocks == blocks
    return core


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def run_alone(core: LocalCore, prompt: list[int], **options: Any) -> Output:
    key = core.submit(prompt, **options)
    core.run()
    return core.outputs[key]


def cached(output: Output) -> int:
    assert output.end is not None
    return output.end.cached_tokens


def last_load(core: LocalCore) -> CoreLoad:
    steps = [message for message in core.link.sent if isinstance(message, CoreStep)]
    return steps[-1].load


def assert_idle(core: LocalCore) -> None:
    """What the load said before the first request, it says again."""
    load = last_load(core)
    assert (load.running, load.waiting, load.used_blocks, load.pending_prefill_tokens) == (0, 0, 0, 0)
    core.engine.scheduler.check()


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 5 * BLOCK + 3])
def test_c50_warm_equals_cold_and_cache_on_equals_off(core: LocalCore, cold: LocalCore, length: int) -> None:
    prompt = prompt_of(length, seed=length)
    answers = [run_alone(which, prompt, top_logprobs=2) for which in (cold, cold, core, core)]
    # The last token's block is computed again: its logits are needed.
    assert [cached(answer) for answer in answers] == [0, 0, 0, (length - 1) // BLOCK * BLOCK]
    for answer in answers[1:]:
        assert answer.token_ids == answers[0].token_ids
        assert answer.logprobs == pytest.approx(answers[0].logprobs, abs=LOGPROBS)
        assert [sorted(top) for top in answer.tops] == [sorted(top) for top in answers[0].tops]


def test_c21_prompt_log_probabilities_are_complete_the_second_time(core: LocalCore, cold: LocalCore) -> None:
    prompt = prompt_of(3 * BLOCK + 2, seed=4)
    run_alone(core, prompt)
    answers = [run_alone(which, prompt, prompt_logprobs=2, top_logprobs=2) for which in (cold, core, core)]
    for answer in answers:
        # Nothing precedes the first token. The logits on the way are needed: nothing comes from a cache.
        assert len(answer.prompt) == len(prompt) - 1
        assert cached(answer) == 0
        assert answer.token_ids == answers[0].token_ids
        values = [value for value, _ in answer.prompt]
        assert values == pytest.approx([value for value, _ in answers[0].prompt], abs=LOGPROBS)
    # Others hit what it computed.
    assert cached(run_alone(core, prompt)) == 3 * BLOCK


def test_a_conversation_hits_what_it_generated(core: LocalCore, cold: LocalCore) -> None:
    prompt = prompt_of(13, seed=1)
    first = run_alone(core, prompt, max_tokens=20)
    longer = prompt + first.token_ids + prompt_of(5, seed=2)
    second = run_alone(core, longer)
    # KV is there of all tokens but the last one that was generated.
    assert cached(second) == (13 + 20 - 1) // BLOCK * BLOCK
    assert second.token_ids == run_alone(cold, longer).token_ids


def test_c51_preempted_sequences_hit_their_own_blocks(
    directory: Path, cold: LocalCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three sequences of 8 blocks in a pool for two and a half."""
    hits: list[int] = []
    acquire = BlockPool.acquire

    def spy(pool: BlockPool, ids: list[int]) -> None:
        hits.append(len(ids))
        acquire(pool, ids)

    monkeypatch.setattr(BlockPool, "acquire", spy)
    core = small_core(directory, 20)
    prompts = [prompt_of(30, seed) for seed in (11, 12, 13)]
    keys = [core.submit(prompt, max_tokens=34) for prompt in prompts]
    core.run()
    for key, prompt in zip(keys, prompts, strict=True):
        output = core.outputs[key]
        assert output.token_ids == run_alone(cold, prompt, max_tokens=34).token_ids
        # The prompts differ: a hit is a preempted sequence's own, which no usage counts as cached.
        assert cached(output) == 0
    assert max(hits) > 0
    assert_idle(core)


def test_salts_share_nothing(core: LocalCore, cold: LocalCore) -> None:
    prompt = prompt_of(4 * BLOCK + 1, seed=5)
    expected = run_alone(cold, prompt).token_ids
    seen = []
    for salt in ("a", "b", "", "a", "b", ""):
        output = run_alone(core, prompt, cache_salt=salt)
        assert output.token_ids == expected
        seen.append(cached(output))
    assert seen == [0, 0, 0, 4 * BLOCK, 4 * BLOCK, 4 * BLOCK]


def test_answers_do_not_depend_on_what_the_cache_evicts(directory: Path, cold: LocalCore) -> None:
    """Conversations over a few common beginnings, in a pool that never holds them all."""
    core, rng = small_core(directory, 24, max_num_seqs=3), random.Random(3)
    beginnings = [prompt_of(length, seed) for seed, length in enumerate((16, 24, 37, 44))]
    hits = 0
    for wave in range(12):
        prompts = [rng.choice(beginnings) + prompt_of(rng.randint(0, 20), wave) for _ in range(3)]
        keys = [core.submit(prompt, max_tokens=12) for prompt in prompts]
        core.run()
        for key, prompt in zip(keys, prompts, strict=True):
            output = core.outputs[key]
            assert output.token_ids == run_alone(cold, prompt, max_tokens=12).token_ids
            hits += cached(output) > 0
    assert hits > 6
    assert_idle(core)


def test_requests_that_begin_alike_and_run_together_share_blocks(core: LocalCore, cold: LocalCore) -> None:
    beginning = prompt_of(6 * BLOCK, seed=9)
    run_alone(core, beginning, max_tokens=1)
    prompts = [beginning + prompt_of(3, seed) for seed in range(5)]
    keys = [core.submit(prompt) for prompt in prompts]
    most = 0
    while (step := core.step()) is not None:
        most = max(most, step.load.used_blocks)
    # Six blocks are common; each has at most three of its own.
    assert most <= 6 + 5 * 3
    for key, prompt in zip(keys, prompts, strict=True):
        assert cached(core.outputs[key]) == 6 * BLOCK
        assert core.outputs[key].token_ids == run_alone(cold, prompt).token_ids


@pytest.mark.parametrize(("reason", "hits"), [(FinishReason.ABORT, 2 * BLOCK), (FinishReason.ERROR, 0)])
def test_only_sound_blocks_are_hit_after_an_early_end(
    core: LocalCore, cold: LocalCore, reason: FinishReason, hits: int
) -> None:
    prompt = prompt_of(2 * BLOCK + 1, seed=6)
    key = core.submit(prompt)
    for _ in range(4):
        core.step()
    assert core.engine.scheduler.end(key, reason) is not None
    core.run()
    again = run_alone(core, prompt)
    assert cached(again) == hits
    assert again.token_ids == run_alone(cold, prompt).token_ids


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 6, 12])
def test_c54_an_abort_at_any_stage_gives_everything_back(core: LocalCore, steps: int) -> None:
    """A prompt of three chunks, another that waits for it, and one that decodes beside them."""
    beside = core.submit(prompt_of(5, seed=1), max_tokens=40)
    core.step()
    keys = [core.submit(prompt_of(60, seed), max_tokens=30) for seed in (2, 3)]
    for _ in range(steps):
        core.step()
    core.loop.handle(AbortSequences([*keys, beside]))
    core.run()
    for key in (*keys, beside):
        end = core.outputs[key].end
        assert end is not None
        assert end.reason is FinishReason.ABORT
    assert_idle(core)


def test_c55_what_comes_late_for_an_ended_sequence_is_ignored(core: LocalCore) -> None:
    aborted, neighbour = core.submit(prompt_of(9, seed=1)), core.submit(prompt_of(9, seed=2))
    core.step()
    core.step()
    # A step that computes the next token of both is on its way.
    core.loop.handle(AbortSequences([aborted]))
    core.loop.handle(AbortSequences([aborted, 999]))
    core.run()
    ended = core.outputs[aborted]
    assert ended.end is not None
    assert ended.end.reason is FinishReason.ABORT
    assert ended.end.completion_tokens == len(ended.token_ids)
    assert len(core.outputs[neighbour].token_ids) == 16
    before = len(core.link.sent)
    core.loop.handle(AbortSequences([aborted, neighbour]))
    assert core.step() is None
    assert len(core.link.sent) == before
    assert_idle(core)


def test_c57_gauges_come_back_after_all_streams_are_gone(core: LocalCore) -> None:
    keys = [core.submit(prompt_of(20 + seed, seed), max_tokens=50) for seed in range(20)]
    for _ in range(9):
        core.step()
    load = last_load(core)
    assert load.running > 0
    assert load.waiting > 0
    assert load.used_blocks > 0
    core.loop.handle(AbortSequences(keys))
    core.run()
    assert_idle(core)
