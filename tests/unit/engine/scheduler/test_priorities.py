"""Sequences run by priority and age, are preempted in reverse, and never starve."""

from __future__ import annotations

from itertools import count

from services.engine.scheduler import SequenceStatus
from tests.support.scheduling import chunk_keys, decode_keys, make_scheduler, make_sequence, make_step


def test_the_more_urgent_start_first_and_equals_by_arrival() -> None:
    engine, _ = make_scheduler(seqs=1)
    for key, priority in enumerate((5, 0, -1, 0, -1, 5)):
        engine.add(make_sequence(key, 3, max_tokens=1, priority=priority))
    assert [chunk_keys(make_step(engine))[0] for _ in range(6)] == [2, 4, 1, 3, 0, 5]


def test_one_that_waits_long_enough_overtakes_the_urgent_stream() -> None:
    engine, _ = make_scheduler(seqs=1, ageing=10)
    patient = make_sequence(0, 3, max_tokens=1, priority=1)
    engine.add(patient)
    for key in count(1):
        engine.add(make_sequence(key, 3, max_tokens=1))
        if chunk_keys(make_step(engine)) == [0]:
            break
    # A step has been planned before each arrival but the first: ten of them make up for the one level.
    assert key == 11


def test_an_urgent_one_takes_the_row_of_the_last_of_the_less_urgent() -> None:
    engine, _ = make_scheduler(seqs=3, prefills=3)
    for key, priority in ((1, 2), (2, 2), (3, 0)):
        engine.add(make_sequence(key, 3, priority=priority))
    make_step(engine)
    engine.add(make_sequence(4, 3, priority=1))
    plan = make_step(engine)
    assert [victim.key for victim in plan.preempted] == [2]
    assert (chunk_keys(plan), decode_keys(plan)) == ([4], [3, 1])
    assert engine.load().waiting == 1


def test_equals_do_not_give_way() -> None:
    engine, _ = make_scheduler(seqs=1)
    engine.add(make_sequence(1, 3, priority=1))
    make_step(engine)
    engine.add(make_sequence(2, 3, priority=1))
    assert not make_step(engine).preempted


def test_nobody_gives_way_in_vain() -> None:
    engine, pool = make_scheduler(blocks=12, seqs=4, prefills=3, tokens=64)
    engine.add(make_sequence(1, 14, priority=0))
    engine.add(make_sequence(2, 10, priority=5))
    make_step(engine)
    assert pool.free_count == 5
    # It needs 8 blocks and one in reserve; all that is less urgent would leave it 8.
    engine.add(make_sequence(3, 32, max_tokens=4))
    assert not make_step(engine).preempted
    engine.abort(3)
    engine.add(make_sequence(4, 26, max_tokens=4))
    plan = make_step(engine)
    assert [victim.key for victim in plan.preempted] == [2]
    assert chunk_keys(plan) == [4]


def test_blocks_that_others_share_do_not_come_free() -> None:
    engine, pool = make_scheduler(blocks=12, seqs=4, prefills=3, tokens=64, prefix_caching=True)
    engine.add(make_sequence(1, 17))
    make_step(engine)
    engine.add(make_sequence(2, 18, priority=5))
    make_step(engine)
    assert pool.used == 6
    # The less urgent one holds 5 blocks, but 4 of them stay with the first.
    engine.add(make_sequence(3, 32, first_token=500, max_tokens=4, priority=1))
    assert not make_step(engine).preempted
    engine.abort(3)
    engine.add(make_sequence(4, 24, first_token=500, max_tokens=4, priority=1))
    plan = make_step(engine)
    assert [victim.key for victim in plan.preempted] == [2]
    engine.check()


def test_an_aged_one_is_not_preempted_by_later_arrivals() -> None:
    preempted = []
    for steps in (1, 6):
        engine, _ = make_scheduler(seqs=1, ageing=4)
        engine.add(make_sequence(1, 3, priority=1))
        for _ in range(steps):
            make_step(engine)
        engine.add(make_sequence(2, 3))
        preempted.append(bool(make_step(engine).preempted))
    assert preempted == [True, False]


def test_the_least_urgent_gives_way_when_blocks_run_out() -> None:
    engine, _ = make_scheduler(blocks=6, model_len=24)
    one, other = make_sequence(1, 7, priority=1), make_sequence(2, 7)
    engine.add(one)
    engine.add(other)
    while one.status is not SequenceStatus.PREEMPTED:
        assert other.status is not SequenceStatus.PREEMPTED
        make_step(engine)
    assert other.status is SequenceStatus.RUNNING
