"""Planning a step while the one before it is in flight."""

from __future__ import annotations

import pytest

from services.engine.bucketing import BucketLimits, build_plan
from services.engine.domain import FinishReason
from services.engine.kv import BlockPool
from services.engine.scheduler import (
    Advanced,
    Finished,
    Scheduler,
    SchedulerConfig,
    SchedulerError,
    Sequence,
    SequenceParams,
    SequenceStatus,
    StepPlan,
)

BLOCK = 4


def scheduler(blocks: int = 64, *, model_len: int = 64, prefills: int = 2, tokens: int = 16) -> Scheduler:
    config = SchedulerConfig(model_len, 4, 4, tokens, prefills)
    buckets = build_plan("exponential", BucketLimits(BLOCK, model_len, 4, tokens, blocks, prefills))
    return Scheduler(config, BlockPool(blocks, BLOCK), buckets)


def sequence(key: int, length: int, max_tokens: int = 20, **params: object) -> Sequence:
    return Sequence(key, list(range(100, 100 + length)), length, SequenceParams(max_tokens, **params))  # type: ignore[arg-type]


def plan(engine: Scheduler) -> StepPlan:
    made = engine.plan()
    assert made is not None
    return made


def rows(made: StepPlan) -> list[tuple[int, int, int | None, bool]]:
    return [(row.sequence.key, row.position, row.token, row.mask_stops) for row in made.decodes]


def test_a_row_whose_token_is_in_flight_has_none() -> None:
    engine = scheduler()
    one = sequence(1, 5, min_tokens=2)
    engine.add(one)
    first = plan(engine)
    assert (one.num_pending, one.row) == (1, 0)
    second = plan(engine)
    assert rows(second) == [(1, 5, None, True)]
    assert one.num_pending == 2
    with pytest.raises(SchedulerError, match="two steps"):
        engine.plan()
    with pytest.raises(SchedulerError, match="not the earliest"):
        engine.commit(second, {1: 8})
    assert engine.commit(first, {1: 7}) == [Advanced(one, 7)]
    third = plan(engine)
    assert rows(third) == [(1, 6, None, False)]
    assert engine.commit(second, {1: 8}) == [Advanced(one, 8)]
    assert engine.commit(third, {1: 9}) == [Advanced(one, 9)]
    assert rows(plan(engine)) == [(1, 7, 9, False)]
    assert one.token_ids[5:] == [7, 8, 9]


def test_who_ends_by_length_is_not_planned_again() -> None:
    engine = scheduler()
    one = sequence(1, 5, max_tokens=2)
    engine.add(one)
    first, second = plan(engine), plan(engine)
    engine.commit(first, {1: 7})
    assert engine.plan() is None
    assert engine.commit(second, {1: 8}) == [Finished(one, 8, FinishReason.LENGTH)]
    engine.check()


def test_what_ended_in_flight_is_dropped() -> None:
    engine = scheduler()
    stops, aborted, goes_on = sequence(1, 5, stop_ids=frozenset({7})), sequence(2, 5), sequence(3, 5)
    for one in (stops, aborted, goes_on):
        engine.add(one)
    first = plan(engine)
    second = plan(engine)
    assert [row.sequence.key for row in second.decodes] == [1, 2]
    assert engine.commit(first, {1: 7, 2: 8}) == [
        Finished(stops, 7, FinishReason.STOP, stop_token_id=7),
        Advanced(aborted, 8),
    ]
    engine.abort(2)
    assert engine.commit(second, {1: 5, 2: 5, 3: 5}) == [Advanced(goes_on, 5)]
    assert (stops.token_ids[5:], aborted.token_ids[5:]) == ([7], [8])
    engine.check()


def test_the_token_of_one_preempted_in_flight_counts_once() -> None:
    engine = scheduler(blocks=6, model_len=24)
    old, new = sequence(1, 7, max_tokens=16), sequence(2, 7, max_tokens=16)
    engine.add(old)
    engine.add(new)
    before = plan(engine)
    token = 1000
    while not (now := plan(engine)).preempted:
        engine.commit(before, {s.key: token for s in before.sampling()})
        before, token = now, token + 1
    assert now.preempted == (new,)
    assert (new.status, new.num_pending, new.row) == (SequenceStatus.PREEMPTED, 1, -1)
    length = len(new.token_ids)
    assert Advanced(new, token) in engine.commit(before, {s.key: token for s in before.sampling()})
    assert (len(new.token_ids), new.num_pending) == (length + 1, 0)
    assert engine.load().pending_prefill_tokens == length + 1
    engine.commit(now, {1: 5})
    engine.check()


def test_blocks_that_are_about_to_come_back_are_waited_for() -> None:
    engine = scheduler(blocks=7, model_len=16, prefills=3, tokens=64)
    grows, ends = sequence(1, 9), sequence(2, 5, max_tokens=4)
    for one in (grows, ends, sequence(3, 4)):
        engine.add(one)
    step = plan(engine)
    for _ in range(3):
        engine.commit(step, {1: 5, 2: 5, 3: 5})
        step = plan(engine)
    assert [row.sequence.key for row in step.decodes] == [1, 2, 3]
    # The first needs a block and none is free, but the second is known to end with the step in flight.
    assert engine.plan() is None
    engine.commit(step, {1: 6, 2: 6, 3: 6})
    step = plan(engine)
    assert ([row.sequence.key for row in step.decodes], step.preempted) == ([1, 3], ())


def test_a_failed_step_is_committed_without_tokens() -> None:
    engine = scheduler()
    engine.add(sequence(1, 5))
    engine.add(sequence(2, 5))
    failed = plan(engine)
    following = plan(engine)
    for key in (1, 2):
        assert engine.end(key, FinishReason.ERROR) is not None
    assert engine.commit(failed, {}) == []
    assert engine.commit(following, {}) == []
    assert not engine.has_work
    engine.check()


def test_the_lowest_free_row_is_given_out() -> None:
    engine = scheduler()
    sequences = [sequence(key, 1) for key in range(1, 5)]
    for one in sequences:
        engine.add(one)
    for _ in range(2):
        made = plan(engine)
        engine.commit(made, {s.key: 1 for s in made.sampling()})
    assert [one.row for one in sequences] == [0, 1, 2, 3]
    engine.abort(2)
    engine.abort(3)
    last = sequence(9, 1)
    engine.add(last)
    plan(engine)
    assert (last.row, sequences[1].row) == (1, -1)
