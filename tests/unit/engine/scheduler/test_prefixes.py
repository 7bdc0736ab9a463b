"""Prefix hits: what is found, what is left there, and what the caller is told."""

from __future__ import annotations

import pytest

from services.engine.scheduler import SequenceParams, SequenceStatus
from tests.support.scheduling import commit, make_plan, make_scheduler, make_sequence, make_step


@pytest.mark.parametrize(("length", "hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (11, 8), (12, 8)])
def test_full_blocks_before_the_last_token_are_hit(length: int, hit: int) -> None:
    engine, pool = make_scheduler(prefix_caching=True)
    engine.add(make_sequence(1, length, max_tokens=1))
    make_step(engine)
    assert pool.used == 0
    again = make_sequence(2, length)
    engine.add(again)
    (chunk,) = make_plan(engine).prefills
    assert (chunk.start, chunk.length, chunk.samples) == (hit, length - hit, True)
    assert again.num_cached_tokens == hit


def test_running_sequences_share_blocks() -> None:
    engine, pool = make_scheduler(prefix_caching=True)
    one, other = make_sequence(1, 10), make_sequence(2, 9)
    engine.add(one)
    make_step(engine)
    engine.add(other)
    make_step(engine)
    assert one.block_table[:2] == other.block_table[:2]
    assert one.block_table[2] != other.block_table[2]
    assert pool.used == 4
    engine.abort(1)
    engine.check()
    assert pool.used == 3


def test_blocks_can_be_hit_once_their_step_is_committed() -> None:
    engine, _ = make_scheduler(prefix_caching=True)
    engine.add(make_sequence(1, 9))
    engine.add(make_sequence(2, 9))
    first = make_plan(engine)
    second = make_plan(engine)
    assert second.prefills[0].start == 0
    commit(engine, first)
    engine.add(make_sequence(3, 9))
    assert make_plan(engine).prefills[0].start == 8


def test_what_was_ended_in_flight_is_not_published() -> None:
    engine, pool = make_scheduler(prefix_caching=True)
    engine.add(make_sequence(1, 9))
    plan = make_plan(engine)
    engine.abort(1)
    commit(engine, plan)
    assert pool.cached_count == 0


def test_generated_tokens_are_hit_too() -> None:
    engine, _ = make_scheduler(prefix_caching=True)
    one = make_sequence(1, 6, max_tokens=7)
    engine.add(one)
    while engine.has_work:
        make_step(engine, token=8)
    following = make_sequence(2, 0)
    following.token_ids, following.prompt_len = [*one.token_ids, 5], 14
    engine.add(following)
    # Of the 13 tokens before, the last was never fed.
    assert make_plan(engine).prefills[0].start == 12


def test_salts_are_kept_apart() -> None:
    engine, _ = make_scheduler(prefix_caching=True)
    engine.add(make_sequence(1, 9, salt=b"one"))
    make_step(engine)
    engine.add(make_sequence(2, 9, salt=b"other"))
    assert make_step(engine).prefills[0].start == 0
    engine.add(make_sequence(3, 9, salt=b"one"))
    assert make_step(engine).prefills[0].start == 8


def test_prompt_log_probabilities_need_the_whole_prompt() -> None:
    engine, _ = make_scheduler(prefix_caching=True)
    engine.add(make_sequence(1, 9))
    make_step(engine)
    scored = make_sequence(2, 9, prompt_logprobs=0)
    engine.add(scored)
    assert make_plan(engine).prefills[0].start == 0
    assert scored.num_cached_tokens == 0


def test_a_preempted_one_hits_its_own_blocks_and_tells_of_its_first_start() -> None:
    engine, _ = make_scheduler(blocks=7, model_len=24, prefix_caching=True)
    old, new = make_sequence(1, 7, max_tokens=17), make_sequence(2, 9, first_token=500, max_tokens=8)
    engine.add(old)
    engine.add(new)
    while not new.num_preemptions:
        make_step(engine)
    while new.status is not SequenceStatus.RUNNING:
        plan = make_step(engine)
    (chunk,) = plan.prefills
    assert chunk.start > 0
    assert new.num_cached_tokens == 0
    while engine.has_work:
        make_step(engine)
    assert (old.num_generated_tokens, new.num_generated_tokens) == (17, 8)


def test_cached_tokens_are_tokens_of_the_prompt() -> None:
    engine, _ = make_scheduler(prefix_caching=True)
    engine.add(make_sequence(1, 13))
    make_step(engine)
    moved = make_sequence(2, 13)
    moved.prompt_len, moved.params = 6, SequenceParams(max_tokens=20)
    engine.add(moved)
    assert make_plan(engine).prefills[0].start == 12
    assert moved.num_cached_tokens == 6


def test_idle_cached_blocks_are_room() -> None:
    engine, pool = make_scheduler(blocks=10, prefix_caching=True)
    engine.add(make_sequence(1, 16, max_tokens=1))
    make_step(engine)
    engine.add(make_sequence(2, 16, first_token=500, max_tokens=1))
    make_step(engine)
    assert (pool.used, pool.cached_count) == (0, 8)
    engine.add(make_sequence(3, 16, max_tokens=20))
    make_step(engine)
    # Three hits; what is evicted for the rest is none of them.
    assert pool.used == 4
    while engine.has_work:
        make_step(engine)
    engine.check()
