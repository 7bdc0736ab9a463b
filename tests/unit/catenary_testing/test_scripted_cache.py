"""The scripted engine's prefix cache and latency model: they change usage and time, and never a token."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary.blockhash import BlockHashes
from catenary_testing.engine import (
    Script,
    ScriptedCapacity,
    ScriptedLatency,
    ScriptedMachine,
    ScriptError,
    continuation,
    load_script,
)
from services.engine.domain import SamplingOptions
from services.engine.link import EndRow, KvChanges, KvContents, SubmitSequence
from tests.support.kv_follower import names_of


def submit(key: int, prompt: list[int], max_tokens: int = 4, **options: Any) -> SubmitSequence:
    sampling = SamplingOptions(seed=7, prompt_logprobs=options.pop("prompt_logprobs", -1))
    return SubmitSequence(key, prompt, len(prompt), sampling, max_tokens, 0, [], False, **options)


class Run:
    """A machine, and what came of its sequences."""

    def __init__(self, *, latency: ScriptedLatency | None = None, **capacity: Any) -> None:
        script = Script(
            capacity=ScriptedCapacity(**{"block_size": 4, "prefix_caching": True, **capacity}),
            latency=latency or ScriptedLatency(),
        )
        self.machine = ScriptedMachine(script)
        self.ends: dict[int, EndRow] = {}
        self.tokens: dict[int, list[int]] = {}
        self.costs: list[float] = []

    def go(self) -> None:
        while self.machine.has_work:
            step = self.machine.step()
            assert step is not None
            self.costs.append(self.machine.cost_s)
            tokens = iter(step.columns.token_ids)
            for key, count in zip(step.columns.keys, step.columns.token_counts, strict=True):
                self.tokens.setdefault(key, []).extend(next(tokens) for _ in range(count))
            for end in step.columns.ends:
                self.ends[step.columns.keys[end.row]] = end
        assert self.machine.load.used_blocks == 0

    def one(self, key: int, prompt: list[int], **options: Any) -> int:
        """Run one sequence alone; its cached tokens."""
        self.machine.submit(submit(key, prompt, **options))
        self.go()
        return self.ends[key].cached_tokens


PROMPT = list(range(10, 22))


def test_a_prompt_hits_its_full_blocks_but_not_its_last_token() -> None:
    run = Run()
    assert run.one(1, PROMPT) == 0
    assert run.one(2, PROMPT) == 8
    assert run.one(3, [*PROMPT, 99]) == 12
    assert run.one(4, [*PROMPT[:6], 99, 98]) == 4
    assert run.one(5, PROMPT[1:]) == 0
    load = run.machine.load
    assert (load.prompt_tokens, load.cached_prompt_tokens) == (12 + 12 + 13 + 8 + 11, 24)
    assert run.tokens[1] == run.tokens[2] == continuation(PROMPT, 4, seed=7, vocab_size=32_000, avoid={2})


def test_another_salt_and_wanted_prompt_logprobs_hit_nothing() -> None:
    run = Run()
    run.one(1, PROMPT)
    assert run.one(2, PROMPT, cache_salt="other") == 0
    assert run.one(3, PROMPT, prompt_logprobs=0) == 0
    assert Run(prefix_caching=False).one(1, PROMPT) == 0


def test_generated_tokens_are_hit_by_the_next_turn() -> None:
    run = Run()
    run.one(1, PROMPT, max_tokens=9)
    # The last token was drawn and its KV not computed.
    assert run.one(2, [*PROMPT, *run.tokens[1], 5]) == 20


def test_the_cache_is_finite_and_gives_up_what_was_used_longest_ago() -> None:
    run = Run(total_blocks=7)
    a, b, c = ([number] * 12 for number in (1, 2, 3))
    run.one(1, a, max_tokens=1)
    run.one(2, b, max_tokens=1)
    assert run.one(3, a, max_tokens=1) == 8
    run.one(4, c, max_tokens=1)
    assert run.one(5, a, max_tokens=1) == 8
    assert run.one(6, b, max_tokens=1) < 8


def test_events_name_what_a_router_would_look_for() -> None:
    run = Run()
    news = run.machine.kv_event_delta
    run.one(1, PROMPT)
    assert list(news.due()) == []
    news.follow()
    (contents,) = news.due()
    assert isinstance(contents, KvContents)
    hashes = BlockHashes(4)
    hashes.extend([*PROMPT, *run.tokens[1][:3]])
    assert set(names_of(contents.names)) == set(hashes.hashes)
    run.one(2, [*PROMPT, *run.tokens[1]])
    (changes,) = news.due()
    assert isinstance(changes, KvChanges)
    assert len(changes.stored) == 16


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=8),
    st.integers(11, 30),
    st.integers(1, 4),
    st.integers(1, 16),
)
def test_no_token_depends_on_what_was_cached(
    jobs: list[tuple[int, int, int]], total_blocks: int, max_running: int, budget: int
) -> None:
    run = Run(total_blocks=total_blocks, max_running=max_running, max_batched_tokens=budget)
    prompts = [[family] * length for family, length, _ in jobs]
    for key, (prompt, (_, _, limit)) in enumerate(zip(prompts, jobs, strict=True)):
        run.machine.submit(submit(key, prompt, limit))
    run.go()
    for key, (prompt, (_, _, limit)) in enumerate(zip(prompts, jobs, strict=True)):
        assert run.tokens[key] == continuation(prompt, limit, seed=7, vocab_size=32_000, avoid={2})
        assert run.ends[key].cached_tokens <= len(prompt) - 1
        assert run.ends[key].prompt_tokens == len(prompt)
    load = run.machine.load
    assert load.prompt_tokens == sum(map(len, prompts))
    assert load.cached_prompt_tokens == sum(end.cached_tokens for end in run.ends.values())


def test_preemptions_are_counted() -> None:
    run = Run(total_blocks=4, prefix_caching=False)
    run.machine.submit(submit(1, [1] * 7, 8))
    run.machine.submit(submit(2, [2] * 7, 8))
    run.go()
    assert run.machine.load.preemptions >= 1
    assert run.machine.load.prompt_tokens == 14


def test_a_step_costs_what_it_computes() -> None:
    latency = ScriptedLatency(
        step_base_ms=10, prefill_us_per_token=100, us_per_sequence=1000, us_per_block=10_000
    )
    run = Run(latency=latency)
    run.one(1, PROMPT, max_tokens=3)
    # 12 tokens in 3 blocks; then the 13th token begins a fourth.
    assert run.costs == pytest.approx([0.01 + 0.0012 + 0.001 + 0.03, 0.051, 0.051])
    run.costs.clear()
    run.one(2, PROMPT, max_tokens=1)
    assert run.costs == pytest.approx([0.01 + 0.0004 + 0.001 + 0.03])
    assert Run().machine.cost_s == 0
    assert ScriptedLatency().seconds(1000, 32, 4096) == 0


def test_a_script_may_have_a_cache_and_a_latency(tmp_path: Any) -> None:
    file = tmp_path / "script.yaml"
    file.write_text("capacity: {prefix_caching: true}\nlatency: {step_base_ms: 5, us_per_block: 2}\n")
    script = load_script(str(file))
    assert script.capacity.prefix_caching
    assert script.latency.seconds(0, 1, 1000) == pytest.approx(0.007)
    file.write_text("latency: {us_per_block: -1}\n")
    with pytest.raises(ScriptError, match="us_per_block"):
        load_script(str(file))
