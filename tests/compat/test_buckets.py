"""Users' bug reports, section G: buckets that were missing or doubled."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.bucketing import BucketLimits, BucketPlan, LinearRange, bits, build_plan
from services.engine.kv import BlockPool
from services.engine.scheduler import Scheduler, SchedulerConfig, Sequence, SequenceParams

NAMES = ("linear", "exponential", "padding")


def test_c60_an_exact_power_of_two_is_not_doubled() -> None:
    assert [1 << bits(value) for value in (1, 2, 255, 256, 257)] == [1, 2, 256, 256, 512]
    assert LinearRange(1, 1024, 256).values() == [1, 2, 4, 8, 16, 32, 64, 128, 256]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("block_size", "length"), [(48, 1000), (528, 131_072)])
def test_c62_the_maximum_context_survives_blocks_that_do_not_divide_the_length(
    name: str, block_size: int, length: int
) -> None:
    most = -(-(length - 1) // block_size)
    limits = BucketLimits(block_size, length, 4, 512, 2 * most)
    plan = build_plan(name, limits)
    found = plan.prefill_bucket(1, 1, most)
    assert found is not None
    assert max(bucket.context_blocks for bucket in plan.prefill) == most <= -(-length // block_size)


@pytest.mark.parametrize("name", NAMES)
def test_c62_the_longest_prompt_runs_to_its_one_token(name: str) -> None:
    limits = BucketLimits(48, 1000, 4, 256, 30)
    scheduler = Scheduler(
        SchedulerConfig(max_model_len=1000, max_num_seqs=4, max_num_batched_tokens=256),
        BlockPool(30, 48),
        build_plan(name, limits),
    )
    scheduler.add(Sequence(1, list(range(999)), 999, SequenceParams(max_tokens=1)))
    contexts = []
    while (plan := scheduler.plan()) is not None:
        assert plan.bucket_prefill is not None
        contexts.append(plan.bucket_prefill.context_blocks)
        scheduler.commit(plan, {sequence.key: 7 for sequence in plan.sampling()})
    assert max(contexts) <= 21


@st.composite
def any_limits(draw: st.DrawFn) -> BucketLimits:
    length = draw(st.integers(2, 3000))
    return BucketLimits(
        block_size=draw(st.sampled_from([16, 48, 128, 528, 4000])),
        max_model_len=length,
        max_num_seqs=draw(st.integers(1, 300)),
        max_num_batched_tokens=draw(st.sampled_from([1, 7, 512, length])),
        num_blocks=draw(st.integers(1, 2000)),
        max_prefill_seqs=draw(st.integers(1, 5)),
    )


def covers_extremes(plan: BucketPlan, limits: BucketLimits) -> bool:
    chunks = [(query, limits.context_before(query)) for query in (1, limits.max_query)]
    chunks += [(limits.max_query, 0), (1, 0)]
    return all(plan.prefill_bucket(1, query, context) is not None for query, context in chunks)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), any_limits())
def test_c63_every_legal_configuration_has_prompt_buckets(name: str, limits: BucketLimits) -> None:
    plan = build_plan(name, limits)
    assert plan.prefill
    assert plan.decode
    assert covers_extremes(plan, limits)
