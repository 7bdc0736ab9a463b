"""Sequences with the same prompt: one computes it, the others take its blocks."""

from __future__ import annotations

from typing import Any

import pytest

from services.engine.domain import FinishReason
from services.engine.kv import BlockMove
from services.engine.scheduler import Scheduler, Sequence, SequenceStatus
from tests.support.scheduling import (
    BLOCK,
    chunk_keys,
    commit,
    decode_keys,
    make_plan,
    make_scheduler,
    make_sequence,
    make_step,
)


def samples(scheduler: Scheduler, count: int, length: int, **options: Any) -> list[Sequence]:
    """So many sequences with one prompt, the first of which leads."""
    made = [make_sequence(key, length, **options) for key in range(1, count + 1)]
    for one in made:
        scheduler.add(one, None if one is made[0] else 1)
    return made


def tokens_computed(scheduler: Scheduler, limit: int = 200) -> tuple[int, int]:
    """Runs until nobody lives; returns tokens that prefills and decodes computed."""
    prefill = decode = 0
    for _ in range(limit):
        if not scheduler.has_work:
            return prefill, decode
        plan = make_step(scheduler)
        prefill += sum(chunk.length for chunk in plan.prefills)
        decode += len(plan.decodes)
    raise AssertionError("the sequences do not end")


@pytest.mark.parametrize("caching", [False, True])
def test_followers_wait_and_take_full_blocks_by_reference(caching: bool) -> None:
    scheduler, pool = make_scheduler(prefills=4, prefix_caching=caching)
    lead, second, third = samples(scheduler, 3, 10)
    first = make_step(scheduler)
    assert chunk_keys(first) == [1]
    assert scheduler.load().waiting == 2
    plan = make_plan(scheduler)
    # Two full blocks; the third begins with two tokens of the leader's, and the prompt's last token is fed.
    assert decode_keys(plan) == [1]
    assert second.block_table[:2] == third.block_table[:2] == lead.block_table[:2]
    copies = tuple(BlockMove(lead.block_table[2], one.block_table[2], 1) for one in (second, third))
    assert (plan.moves, plan.moved) == (copies, (second, third))
    assert [pool.references(block) for block in lead.block_table] == [3, 3, 1]
    assert second.num_cached_tokens == (2 * BLOCK if caching else 0)
    commit(scheduler, plan)
    plan = make_plan(scheduler)
    assert [(row.sequence.key, row.position, row.token) for row in plan.decodes] == [
        (1, 11, 1),
        (2, 9, 109),
        (3, 9, 109),
    ]
    commit(scheduler, plan)
    scheduler.check()


def test_the_prompt_is_computed_once() -> None:
    scheduler, pool = make_scheduler(blocks=256, model_len=128, seqs=8)
    samples(scheduler, 8, 50, max_tokens=5)
    # Each follower feeds the prompt's last token again.
    assert tokens_computed(scheduler) == (50, 4 + 7 * 5)
    assert pool.used == 0
    alone, _ = make_scheduler(blocks=256, model_len=128, seqs=8)
    for key in range(8):
        alone.add(make_sequence(key, 50, max_tokens=5))
    assert tokens_computed(alone) == (8 * 50, 8 * 4)


def test_a_prompt_outlives_the_leader_that_ends_with_it() -> None:
    scheduler, pool = make_scheduler()
    _, second, third = samples(scheduler, 3, 9, max_tokens=1)
    make_step(scheduler)
    # Nobody else is there: the followers decode in the very step that starts them.
    plan = make_plan(scheduler)
    assert (chunk_keys(plan), decode_keys(plan), plan.moves) == ([], [2, 3], ())
    assert second.block_table[:2] == third.block_table[:2]
    commit(scheduler, plan)
    assert (scheduler.has_work, pool.used) == (False, 0)


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_the_first_follower_leads_if_the_leader_ends_before(reason: FinishReason) -> None:
    scheduler, _ = make_scheduler(tokens=8)
    lead, second, third = samples(scheduler, 3, 20)
    make_step(scheduler)
    scheduler.end(lead.key, reason)
    scheduler.check()
    assert [chunk_keys(make_step(scheduler)) for _ in range(3)] == [[2]] * 3
    assert decode_keys(make_step(scheduler)) == [2]
    assert third.block_table[:4] == second.block_table[:4]
    scheduler.abort(3)
    assert decode_keys(make_step(scheduler)) == [2]
    scheduler.check()


def test_a_follower_that_ends_while_it_waits_leaves_nothing() -> None:
    scheduler, pool = make_scheduler()
    samples(scheduler, 3, 10)
    make_step(scheduler)
    scheduler.abort(2)
    scheduler.abort(3)
    scheduler.check()
    assert (scheduler.load().waiting, scheduler.load().pending_prefill_tokens) == (0, 0)
    scheduler.abort(1)
    assert pool.used == 0


def test_what_is_kept_is_given_up_when_blocks_are_short() -> None:
    # The leader ends; two followers find no row, and what runs grows into the blocks that wait for them.
    scheduler, pool = make_scheduler(blocks=8, seqs=1, model_len=32)
    _, second, _ = samples(scheduler, 3, 9, max_tokens=1)
    other = make_sequence(9, 13, max_tokens=19)
    make_step(scheduler)
    scheduler.add(other)
    assert pool.used == 3
    scheduler.abort(second.key)
    assert tokens_computed(scheduler)[0] == 13
    assert pool.used == 0
    scheduler, pool = make_scheduler(blocks=8, seqs=2, model_len=32)
    scheduler.add(make_sequence(9, 13, max_tokens=19))
    scheduler.add(make_sequence(8, 9, max_tokens=1))
    make_step(scheduler)
    scheduler.add(make_sequence(7, 9, max_tokens=19), 8)
    make_step(scheduler)
    scheduler.add(make_sequence(6, 9, max_tokens=19), 7)
    tokens_computed(scheduler)
    assert pool.used == 0


def test_a_preempted_leader_leads_again() -> None:
    scheduler, _ = make_scheduler(blocks=8, seqs=3, tokens=4, model_len=32)
    scheduler.add(make_sequence(9, 4, max_tokens=28))
    make_step(scheduler)
    lead = make_sequence(1, 20, max_tokens=4)
    scheduler.add(lead)
    scheduler.add(make_sequence(2, 20, max_tokens=4), 1)
    for _ in range(60):
        if lead.num_preemptions:
            break
        make_step(scheduler)
    assert lead.status is SequenceStatus.PREEMPTED
    scheduler.check()
    tokens_computed(scheduler)


def test_the_prompt_is_not_shared_where_that_would_be_wrong() -> None:
    scheduler, _ = make_scheduler(prefills=4, seqs=8, tokens=64)
    scheduler.add(make_sequence(1, 10))
    others = {
        2: make_sequence(2, 10, salt=b"other"),
        3: make_sequence(3, 10, first_token=7),
        4: make_sequence(4, 11),
        5: make_sequence(5, 10, prompt_logprobs=0),
        6: make_sequence(6, 10, priority=-1),
    }
    for one in others.values():
        scheduler.add(one, 1)
    scheduler.add(make_sequence(7, 10), 99)
    started = [*chunk_keys(make_step(scheduler)), *chunk_keys(make_step(scheduler))]
    assert sorted(started) == [1, 2, 3, 4, 5, 6, 7]
    contiguous, _ = make_scheduler(prefills=4, contiguous=True)
    samples(contiguous, 2, 10)
    assert [chunk_keys(make_step(contiguous)) for _ in "ab"] == [[1], [2]]


def test_a_late_follower_takes_the_prompt_of_one_that_generates() -> None:
    scheduler, _ = make_scheduler()
    lead = make_sequence(1, 10)
    scheduler.add(lead)
    make_step(scheduler)
    make_step(scheduler)
    late = make_sequence(2, 10)
    scheduler.add(late, 1)
    plan = make_step(scheduler)
    assert (chunk_keys(plan), late.block_table[:2]) == ([], lead.block_table[:2])


def test_a_resumed_follower_goes_on_behind_the_prompt() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_sequence(1, 10))
    resumed = make_sequence(2, 10)
    resumed.token_ids += [5, 6, 7]
    scheduler.add(resumed, 1)
    make_step(scheduler)
    plan = make_step(scheduler)
    assert [(chunk.start, chunk.length, chunk.samples) for chunk in plan.prefills] == [(10, 3, True)]
    assert [(move.target, move.tokens) for move in plan.moves] == [(resumed.block_table[2], 2)]
