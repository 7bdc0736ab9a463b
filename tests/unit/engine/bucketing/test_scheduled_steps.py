"""No step of the scheduler needs a shape that the plan does not have, whatever the strategy."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.bucketing import (
    STRATEGIES,
    AxisOptions,
    Bucket,
    BucketAxes,
    BucketLimits,
    BucketPlan,
    build_plan,
    plan_of,
    taken_axes,
)
from services.engine.kv import BlockPool
from services.engine.learning import Budget, ModelCost, estimated_times, learn_buckets
from services.engine.scheduler import Scheduler, SchedulerConfig, Sequence, SequenceParams, StepPlan

COST = ModelCost(1e9, 2, 100_000, 4096, 32_000)


def plan_for(name: str, limits: BucketLimits) -> BucketPlan:
    if name == "file":
        return plan_of([Bucket(1, 20, 1), Bucket(2, 16, 0), Bucket(2, 1, 3), Bucket(3, 1, 7)], limits)
    if name == "learned":
        times = estimated_times(
            COST,
            block_size=limits.block_size,
            bytes_per_second=1e12,
            flops_per_second=1e14,
            launch_s=1e-4,
        )
        shapes = Counter({Bucket(1, 9, 0): 5, Bucket(2, 9, 1): 3}), Counter({Bucket(2, 1, 4): 50})
        return plan_of(learn_buckets(*shapes, limits, times, Budget(graphs=12)), limits)
    return build_plan(name, limits)


def check(step: StepPlan, plan: BucketPlan, limits: BucketLimits) -> int:
    """Checks a step's buckets; returns its sum of decode blocks."""
    size = limits.block_size
    if step.prefills:
        query = max(chunk.length for chunk in step.prefills)
        context = max(-(-chunk.start // size) for chunk in step.prefills)
        assert step.bucket_prefill in plan.prefill
        assert step.bucket_prefill.covers(len(step.prefills), query, context)
    if not step.decodes:
        return 0
    blocks = sum(row.position // size + 1 for row in step.decodes)
    assert step.bucket_decode in plan.decode
    assert step.bucket_decode.covers(len(step.decodes), 1, blocks)
    return blocks


def serve(plan: BucketPlan, limits: BucketLimits, seed: int, *, caching: bool) -> int:
    """Serves random sequences, half with a common prefix; returns the largest sum of decode blocks."""
    draw = random.Random(seed)
    config = SchedulerConfig(
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_prefill_seqs=limits.max_prefill_seqs,
    )
    pool = BlockPool(limits.num_blocks, limits.block_size, prefix_caching=caching)
    scheduler, most = Scheduler(config, pool, plan), 0
    longest = min(limits.max_model_len, limits.num_blocks * limits.block_size)
    for key in range(24):
        length = draw.choice([1, longest - 1, draw.randint(1, longest - 1)])
        start = 0 if key % 2 else 1000 * key
        tokens = [start + at for at in range(length)]
        scheduler.add(Sequence(key, tokens, length, SequenceParams(max_tokens=min(40, longest - length))))
        for _ in range(draw.randint(0, 6)):
            most = max(most, _step(scheduler, plan, limits))
    while scheduler.has_work:
        most = max(most, _step(scheduler, plan, limits))
    scheduler.check()
    return most


def _step(scheduler: Scheduler, plan: BucketPlan, limits: BucketLimits) -> int:
    step = scheduler.plan()
    if step is None:
        return 0
    blocks = check(step, plan, limits)
    scheduler.commit(step, {sequence.key: 7 for sequence in step.sampling()})
    return blocks


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([*STRATEGIES, "file", "learned"]),
    st.integers(16, 784),
    st.integers(2, 900),
    st.integers(1, 8),
    st.integers(0, 300),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 99),
)
def test_every_step_has_its_bucket(
    name: str,
    block_size: int,
    max_model_len: int,
    seqs: int,
    tokens: int,
    together: int,
    caching: bool,
    seed: int,
) -> None:
    longest = -(-max_model_len // block_size)
    limits = BucketLimits(
        block_size,
        max_model_len,
        seqs,
        seqs + tokens,
        random.Random(seed).randint(longest, longest * seqs),
        max_prefill_seqs=together,
    )
    serve(plan_for(name, limits), limits, seed, caching=caching)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(STRATEGIES)), st.integers(0, 9999))
def test_every_step_has_its_bucket_whatever_the_axes(name: str, seed: int) -> None:
    draw = random.Random(seed)

    def axis(most: int) -> AxisOptions:
        first, last = sorted((draw.randint(1, most), draw.randint(1, most)))
        return AxisOptions(
            draw.choice([None, first]), draw.choice([None, 1, 3, 40]), draw.choice([None, last])
        )

    limits = BucketLimits(16, 200, 8, 64, draw.randint(13, 100), max_prefill_seqs=3)
    axes = taken_axes(name, BucketAxes(axis(3), axis(64), axis(12), axis(8), axis(13)))
    serve(build_plan(name, limits, axes=axes), limits, seed, caching=draw.random() < 0.5)


@pytest.mark.parametrize("name", ["linear", "exponential", "padding", "learned"])
def test_shared_blocks_that_exceed_the_pool_together_have_a_bucket(name: str) -> None:
    limits = BucketLimits(16, 200, 8, 64, 20, max_prefill_seqs=2)
    assert serve(plan_for(name, limits), limits, 1, caching=True) > limits.num_blocks


def test_shared_blocks_that_exceed_a_file_are_split_over_steps() -> None:
    limits = BucketLimits(16, 200, 8, 64, 20, max_prefill_seqs=2)
    plan = plan_for("file", limits)
    assert serve(plan, limits, 1, caching=True) == plan.max_decode_blocks == limits.num_blocks
