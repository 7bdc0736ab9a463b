"""The scripted engine's pure parts: its tokens, its scripts, its scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary_testing.engine import (
    Match,
    Rule,
    Script,
    ScriptedCapacity,
    ScriptError,
    Then,
    continuation,
    load_script,
    next_token,
)
from catenary_testing.engine.machine import QueueFull, ScriptedMachine
from services.engine.domain import FinishReason, SamplingOptions
from services.engine.link import SubmitSequence

ids = st.lists(st.integers(0, 199), min_size=1, max_size=30)


def _submit(key: int, prompt: list[int], max_tokens: int = 5) -> SubmitSequence:
    return SubmitSequence(key, prompt, len(prompt), SamplingOptions(seed=7), max_tokens, 0, [], False)


@given(ids, st.integers(-(2**63), 2**63 - 1), st.integers(1, 20))
def test_a_continuation_can_be_cut_anywhere(prompt: list[int], seed: int, cut: int) -> None:
    whole = continuation(prompt, 20, seed=seed, vocab_size=200, avoid={2})
    rest = continuation([*prompt, *whole[:cut]], 20 - cut, seed=seed, vocab_size=200, avoid={2})
    assert whole[cut:] == rest
    assert whole[0] == next_token(prompt, seed=seed, vocab_size=200, avoid={2})
    assert all(0 <= token < 200 and token != 2 for token in whole)


def test_a_token_depends_on_ids_seed_and_order() -> None:
    first = [next_token([1, 2, 3], seed=s, vocab_size=2**31) for s in range(50)]
    assert len(set(first)) == 50
    assert next_token([1, 2], seed=0, vocab_size=2**31) != next_token([2, 1], seed=0, vocab_size=2**31)


def test_nothing_left_to_choose_is_an_error() -> None:
    with pytest.raises(ValueError):
        next_token([1], seed=0, vocab_size=2, avoid={0, 1})


@given(
    st.lists(st.tuples(ids, st.integers(1, 20)), min_size=1, max_size=8),
    st.integers(14, 40),
    st.integers(1, 4),
    st.integers(1, 16),
)
def test_every_sequence_ends_right_and_all_blocks_return(
    jobs: list[tuple[list[int], int]], total_blocks: int, max_running: int, budget: int
) -> None:
    capacity = ScriptedCapacity(
        block_size=4, total_blocks=total_blocks, max_running=max_running, max_batched_tokens=budget
    )
    script = Script(capacity=capacity)
    machine, tokens, ended = ScriptedMachine(script), dict[int, list[int]](), set[int]()
    for key, (prompt, count) in enumerate(jobs):
        machine.submit(_submit(key, prompt, count))
    for _ in range(10_000):
        if not machine.has_work:
            break
        step = machine.step()
        assert step is not None
        assert step.load.used_blocks <= total_blocks
        assert step.load.running <= max_running
        columns, offset = step.columns, 0
        for key, count in zip(columns.keys, columns.token_counts, strict=True):
            assert key not in ended
            tokens.setdefault(key, []).extend(columns.token_ids[offset : offset + count])
            offset += count
        ended.update(columns.keys[end.row] for end in columns.ends)
    assert not machine.has_work
    assert machine.load.used_blocks == machine.load.running == machine.load.waiting == 0
    assert machine.load.pending_prefill_tokens == 0
    vocab, avoid = script.model.vocab_size, script.model.eos_token_ids
    for key, (prompt, count) in enumerate(jobs):
        assert tokens[key] == continuation(prompt, count, seed=7, vocab_size=vocab, avoid=avoid)


def test_the_queue_is_finite() -> None:
    machine = ScriptedMachine(Script(capacity=ScriptedCapacity(max_running=1, max_waiting=1)))
    machine.submit(_submit(1, [1]))
    machine.submit(_submit(2, [1]))
    with pytest.raises(QueueFull):
        machine.submit(_submit(3, [1]))


def test_aborts_end_waiting_and_running_sequences_and_ignore_others() -> None:
    machine = ScriptedMachine(Script(capacity=ScriptedCapacity(max_running=1)))
    machine.submit(_submit(1, [1], 50))
    machine.submit(_submit(2, [1], 50))
    assert machine.step() is not None
    machine.abort([1, 2, 2, 77])
    step = machine.step()
    assert step is not None
    assert {step.columns.keys[end.row] for end in step.columns.ends} == {1, 2}
    assert {end.reason for end in step.columns.ends} == {FinishReason.ABORT}
    assert (step.load.running, step.load.waiting, step.load.used_blocks) == (0, 0, 0)


def test_a_script_is_read_from_yaml(tmp_path: Path) -> None:
    file = tmp_path / "script.yaml"
    file.write_text(
        "model: {vocab_size: 100, eos_token_ids: [3]}\n"
        "capacity: {total_blocks: 8}\n"
        "rules:\n- {match: prefix, prompt: [1], tokens: [5, 6], step_delay_ms: 2, then: hash}\n"
        "faults: {stall_after_tokens: 4}\n"
    )
    script = load_script(str(file))
    assert (script.model.vocab_size, script.capacity.total_blocks) == (100, 8)
    assert script.rule_for([1, 9]) == Rule((1,), Match.PREFIX, (5, 6), step_delay_ms=2, then=Then.HASH)
    assert script.rule_for([2]) is None
    assert script.faults.stall_after_tokens == 4
    assert load_script("default") == Script()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rules: 5", "rules"),
        ("modle: {}", "modle"),
        ("model: {vocab_size: 0}", "vocab_size"),
        ("model: {vocab_size: 2, eos_token_ids: [2]}", "eos_token_ids"),
        ("model: {vocab_size: 1, eos_token_ids: [0]}", "leave no other id"),
        ("rules: [{tokens: [1, 2], logprobs: [-1]}]", "logprobs"),
        ("rules: [{tokens: [99999]}]", "tokens"),
        ("rules: [", "bad script"),
        ("- 1", "bad script"),
    ],
)
def test_a_bad_script_is_named_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "script.yaml"
    file.write_text(text)
    with pytest.raises(ScriptError, match=said) as caught:
        load_script(str(file))
    assert "\n" not in str(caught.value)


def test_a_missing_script_is_named() -> None:
    with pytest.raises(ScriptError, match="/nowhere"):
        load_script("/nowhere")
