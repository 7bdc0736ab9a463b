"""Contiguous KV: buckets reach to the highest block, and what runs moves down into holes."""

from __future__ import annotations

import pytest

from services.engine.bucketing import Bucket, BucketLimits, BucketPlan, build_plan
from services.engine.kv import BlockMove, BlockPool
from services.engine.scheduler import Scheduler, SchedulerConfig
from tests.support.scheduling import BLOCK, commit, make_plan, make_scheduler, make_sequence, make_step


def test_holes_are_filled_and_tables_follow() -> None:
    engine, pool = make_scheduler(blocks=32, prefills=2, tokens=64, contiguous=True)
    first, last = make_sequence(1, 15), make_sequence(2, 7)
    engine.add(first)
    engine.add(last)
    plan = make_step(engine)
    assert (first.block_table, last.block_table, plan.moves) == ([0, 1, 2, 3], [4, 5], ())
    engine.abort(1)
    plan = make_step(engine)
    assert plan.moves == (BlockMove(5, 0), BlockMove(4, 1))
    assert plan.moved == (last,)
    assert (last.block_table, last.highest_block, pool.highest_used) == ([1, 0], 1, 1)
    assert plan.bucket_decode is not None
    assert plan.bucket_decode.context_blocks < 6
    engine.check()


def test_the_bucket_reaches_to_the_highest_block_of_the_batch() -> None:
    engine, _ = make_scheduler(blocks=32, prefills=2, tokens=64, contiguous=True)
    engine.add(make_sequence(1, 15))
    engine.add(make_sequence(2, 7))
    make_step(engine)
    plan = make_plan(engine)
    assert plan.bucket_decode is not None
    assert plan.bucket_decode.covers(2, 1, 6)


def test_what_a_step_in_flight_fills_is_moved_by_the_next() -> None:
    engine, _ = make_scheduler(blocks=32, prefills=2, tokens=64, contiguous=True)
    first, last = make_sequence(1, 15), make_sequence(2, 7)
    engine.add(first)
    engine.add(last)
    make_step(engine)
    flies = make_plan(engine)
    assert last.block_table == [4, 5]
    engine.abort(1)
    following = make_plan(engine)
    # The step in flight writes token 7 to block 5. The copy comes after that, and token 8 gets block 0.
    assert following.moves == (BlockMove(5, 1), BlockMove(4, 2))
    assert last.block_table == [2, 1, 0]
    commit(engine, flies)
    commit(engine, following)
    engine.check()


def test_it_cannot_share_blocks() -> None:
    with pytest.raises(ValueError, match="prefix caching off"):
        make_scheduler(prefix_caching=True, contiguous=True)


def test_the_decode_buckets_must_reach_as_far_as_blocks_are_used() -> None:
    plan = build_plan("exponential", BucketLimits(BLOCK, 64, 4, 16, 64, 1, contiguous=True))
    short = BucketPlan(plan.prefill, [Bucket(4, 1, 63)], BLOCK)
    with pytest.raises(ValueError, match="first 64 blocks"):
        Scheduler(SchedulerConfig(64, 4, 4, 16, contiguous=True), BlockPool(64, BLOCK), short)


def test_a_pool_that_sequences_cannot_fill_gets_no_bucket_for_all_of_it() -> None:
    """The lowest free ids go out first, so that no id lies beyond what all sequences hold together."""
    limits = BucketLimits(BLOCK, 64, 4, 16, 200, 1, contiguous=True)
    plan = build_plan("exponential", limits)
    assert plan.max_decode_blocks == 4 * limits.blocks_per_sequence < 200
    pool = BlockPool(200, BLOCK)
    engine = Scheduler(SchedulerConfig(64, 4, 4, 16, contiguous=True), pool, plan)
    engine.add(make_sequence(1, 40, max_tokens=23))
    for number in range(2, 40):
        engine.add(make_sequence(number, 50, max_tokens=13))
        for _ in range(6):
            step = make_step(engine)
            assert pool.highest_used < plan.max_decode_blocks
            assert not step.decodes or step.bucket_decode is not None
    engine.check()
