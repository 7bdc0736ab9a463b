"""Laws of a plan: whatever the scheduler can produce is covered, and matching wastes the least."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.bucketing import (
    STRATEGIES,
    Bucket,
    BucketLimits,
    BucketPlan,
    build_plan,
    dummy_decode_lengths,
    dummy_prefill_chunks,
    strategy_names,
)

NAMES = st.sampled_from(sorted(STRATEGIES))


@st.composite
def any_limits(draw: st.DrawFn, largest_len: int = 1500) -> BucketLimits:
    return BucketLimits(
        block_size=draw(st.integers(16, 784)),
        max_model_len=draw(st.integers(2, largest_len)),
        max_num_seqs=draw(st.integers(1, 70)),
        max_num_batched_tokens=draw(st.integers(1, 1500)),
        num_blocks=draw(st.integers(1, 400)),
        max_prefill_seqs=draw(st.integers(1, 6)),
        contiguous=draw(st.booleans()),
    )


def check_prefill(plan: BucketPlan, batch: int, query: int, context: int) -> None:
    bucket = plan.prefill_bucket(batch, query, context)
    assert bucket is not None
    assert bucket.covers(batch, query, context)
    assert plan.prefill_bucket(bucket.batch, bucket.query, bucket.context_blocks) == bucket


def check_decode(plan: BucketPlan, batch: int, blocks: int) -> None:
    bucket = plan.decode_bucket(batch, blocks)
    assert bucket is not None
    assert bucket.covers(batch, 1, blocks)
    assert plan.decode_bucket(bucket.batch, bucket.context_blocks) == bucket


@settings(max_examples=40, deadline=None)
@given(NAMES, any_limits(), st.data())
def test_every_single_prefill_within_the_limits_is_covered(
    name: str, limits: BucketLimits, data: st.DataObject
) -> None:
    plan = build_plan(name, limits)
    assert plan.max_prefill_query == limits.max_query
    assert plan.max_prefill_context == limits.max_context_blocks
    for query in range(1, limits.max_query + 1):
        check_prefill(plan, 1, query, 0)
    for context in range(limits.max_context_blocks + 1):
        check_prefill(plan, 1, 1, context)
    for _ in range(30):
        query = data.draw(st.integers(1, limits.max_query))
        check_prefill(plan, 1, query, data.draw(st.integers(0, limits.max_context_blocks)))


@settings(max_examples=40, deadline=None)
@given(NAMES, any_limits(), st.data())
def test_prefills_of_several_rows_are_covered_up_to_the_budget(
    name: str, limits: BucketLimits, data: st.DataObject
) -> None:
    plan = build_plan(name, limits)
    for batch in range(1, limits.max_prefill_seqs + 1):
        query = data.draw(st.integers(1, limits.max_query))
        bucket = plan.prefill_bucket(batch, query, 0)
        shapes = {(b.batch, b.query) for b in plan.prefill}
        if any(rows >= batch and length >= query for rows, length in shapes):
            assert bucket is not None
            assert bucket.batch * bucket.query <= limits.max_num_batched_tokens
        else:
            assert bucket is None


@settings(max_examples=40, deadline=None)
@given(NAMES, any_limits(), st.data())
def test_every_decode_batch_within_the_limits_is_covered(
    name: str, limits: BucketLimits, data: st.DataObject
) -> None:
    """Shared blocks count once for each sequence, so the sum may exceed the pool; the scheduler splits it."""
    plan = build_plan(name, limits)
    most = plan.max_decode_blocks
    assert most >= limits.max_distinct_decode_blocks
    for batch in range(1, plan.max_decode_batch + 1):
        longest = most if limits.contiguous else min(most, batch * limits.blocks_per_sequence)
        least = 1 if limits.contiguous else batch
        for blocks in {least, longest, data.draw(st.integers(least, longest))}:
            check_decode(plan, batch, blocks)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(
        [
            ("linear", 528),
            ("linear", 784),
            ("padding", 16),
            ("padding", 528),
            ("exponential", 16),
            ("exponential", 48),
            ("exponential", 784),
        ]
    ),
    st.integers(8000, 131_072),
    st.data(),
)
def test_long_models_are_covered(kind: tuple[str, int], max_model_len: int, data: st.DataObject) -> None:
    name, block_size = kind
    blocks = -(-max_model_len // block_size)
    limits = BucketLimits(block_size, max_model_len, 8, 2048, 2 * blocks, max_prefill_seqs=2)
    plan = build_plan(name, limits)
    for query in {1, 2048, *(b.query for b in plan.prefill), *(b.query % 2048 + 1 for b in plan.prefill)}:
        check_prefill(plan, 1, query, limits.context_before(query))
    for _ in range(20):
        query = data.draw(st.integers(1, 2048))
        check_prefill(plan, 1, query, data.draw(st.integers(0, limits.context_before(query))))
        batch = data.draw(st.integers(1, 8))
        check_decode(plan, batch, data.draw(st.integers(batch, min(2 * blocks, batch * blocks))))


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_a_model_length_that_the_blocks_do_not_divide_keeps_its_last_context(name: str) -> None:
    plan = build_plan(name, BucketLimits(48, 1000, 4, 512, 200))
    assert plan.max_prefill_context == 21


@pytest.mark.parametrize("name", ["linear", "exponential", "padding"])
def test_maxima_that_a_generator_drops_become_the_last_buckets(name: str) -> None:
    limits = BucketLimits(32, 1000, 48, 500, 2000, max_prefill_seqs=3)
    plan = build_plan(name, limits)
    assert plan.max_decode_batch == 48
    assert plan.max_prefill_query == 500
    assert plan.max_prefill_batch == 3
    assert plan.max_decode_blocks >= 48 * 32


@settings(max_examples=40, deadline=None)
@given(NAMES, any_limits(largest_len=600), st.data())
def test_a_match_has_the_least_padded_work_of_all_covering_buckets(
    name: str, limits: BucketLimits, data: st.DataObject
) -> None:
    plan = build_plan(name, limits)
    batch = data.draw(st.integers(1, plan.max_decode_batch))
    blocks = data.draw(st.integers(min(batch, plan.max_decode_blocks), plan.max_decode_blocks))
    covering = [b for b in plan.decode if b.covers(batch, 1, blocks)]
    if covering:
        found = plan.decode_bucket(batch, blocks)
        assert found is not None
        assert decode_work(found, limits) == min(decode_work(b, limits) for b in covering)
    query = data.draw(st.integers(1, limits.max_query))
    context = data.draw(st.integers(0, limits.max_context_blocks))
    chunk = plan.prefill_bucket(1, query, context)
    assert chunk is not None
    best = min(prefill_work(b, limits) for b in plan.prefill if b.covers(1, query, context))
    assert prefill_work(chunk, limits) == best


def decode_work(bucket: Bucket, limits: BucketLimits) -> int:
    return bucket.batch * 4096 + bucket.context_blocks * limits.block_size


def prefill_work(bucket: Bucket, limits: BucketLimits) -> int:
    reach = bucket.context_blocks * limits.block_size + bucket.query
    return bucket.batch * bucket.query * (4096 + reach)


def test_the_match_is_not_the_first_in_order() -> None:
    """Two rows over few blocks beat one row over a giant context."""
    plan = BucketPlan([Bucket(1, 32, 0)], [Bucket(1, 1, 4096), Bucket(2, 1, 8)], 128)
    assert plan.decode_bucket(1, 8) == Bucket(2, 1, 8)
    assert plan.decode_bucket(1, 9) == Bucket(1, 1, 4096)
    assert plan.decode_bucket(2, 9) is None
    assert plan.prefill_bucket(1, 33, 0) is None
    assert plan.prefill_bucket(1, 3, 1) is None


def test_names_of_strategies() -> None:
    limits = BucketLimits(32, 256, 4, 128, 64)
    for short, name in (("lin", "linear"), ("exp", "exponential"), ("pad", "padding")):
        assert build_plan(short, limits).decode == build_plan(name, limits).decode
    with pytest.raises(ValueError, match="unknown bucketing strategy 'best'"):
        build_plan("best", limits)
    assert set(strategy_names()) >= {"linear", "exponential", "padding", "file"}


@pytest.mark.parametrize("option", ["block_size", "max_num_seqs", "num_blocks"])
def test_senseless_limits_are_named(option: str) -> None:
    values: dict[str, Any] = {
        "block_size": 32,
        "max_model_len": 64,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "num_blocks": 8,
    }
    with pytest.raises(ValueError, match=option):
        BucketLimits(**{**values, option: 0})


def test_contiguous_decode_reaches_the_whole_pool() -> None:
    limits = BucketLimits(32, 1000, 48, 500, 77, contiguous=True)
    for name in ("linear", "exponential", "padding"):
        plan = build_plan(name, limits)
        assert plan.max_decode_blocks == 77
        assert plan.decode_bucket(1, 77) is not None
        assert plan.decode_bucket(48, 3) is not None


def test_matching_is_quick() -> None:
    limits = BucketLimits(16, 131_072, 256, 8192, 20_000)
    plan = build_plan("exponential", limits)
    began = time.process_time()
    for n in range(1000):
        plan.decode_bucket(n % 256 + 1, 10_000 + n)
        plan.prefill_bucket(1, n + 1, n)
    assert time.process_time() - began < 1.0


def test_a_long_model_spends_no_bucket_on_context_that_no_chunk_has() -> None:
    limits = BucketLimits(128, 91_964, 8, 2048, 3593)
    for name in ("linear", "exponential", "padding"):
        plan = build_plan(name, limits)
        shorter = {q: p for p, q in zip([0, *range(128, 2048, 128)], range(128, 2049, 128), strict=True)}
        for bucket in plan.prefill:
            assert bucket.context_blocks <= limits.context_before(1)
            if name == "linear":
                assert bucket.context_blocks <= limits.context_before(shorter[bucket.query] + 1)
        deepest = max(b.context_blocks for b in plan.prefill if b.query == 2048)
        assert deepest < limits.max_context_blocks


def test_row_23_blocks_of_a_hybrid_model_are_not_clamped_to_the_pool() -> None:
    limits = BucketLimits(128, 262_144, 45, 2048, 15_405, clamp_decode_blocks=False)
    plan = build_plan("exponential", limits)
    assert plan.max_decode_blocks == 92_160
    found = plan.decode_bucket(28, 37_620)
    assert found is not None
    assert found.covers(28, 1, 37_620)


@settings(max_examples=40, deadline=None)
@given(NAMES, any_limits())
def test_dummy_inputs_map_back_to_their_bucket(name: str, limits: BucketLimits) -> None:
    plan = build_plan(name, limits)
    size = limits.block_size
    for bucket in plan.decode:
        if limits.contiguous and bucket.batch > bucket.context_blocks:
            continue
        lengths = dummy_decode_lengths(bucket, limits)
        assert all(0 <= length < limits.max_model_len for length in lengths)
        blocks = sum(length // size + 1 for length in lengths)
        assert blocks == bucket.context_blocks or limits.contiguous
        assert plan.decode_bucket(len(lengths), bucket.context_blocks) == bucket
        assert max(lengths) - min(lengths) <= size
    for bucket in plan.prefill:
        fits = bucket.query <= limits.max_model_len
        deep = limits.context_before(bucket.query) >= bucket.context_blocks
        if not fits or not deep:
            continue
        chunks = dummy_prefill_chunks(bucket, limits)
        assert all(start + length <= limits.max_model_len for start, length in chunks)
        longest = max(length for _, length in chunks)
        context = max(-(-start // size) for start, _ in chunks)
        assert plan.prefill_bucket(len(chunks), longest, context) == bucket


def test_dummies_of_buckets_that_nothing_fills_are_refused() -> None:
    limits = BucketLimits(32, 100, 8, 64, 64, max_prefill_seqs=2)
    with pytest.raises(ValueError, match="2 rows of 1 to 4 blocks do not have 9"):
        dummy_decode_lengths(Bucket(2, 1, 9), limits)
    with pytest.raises(ValueError, match="no chunk of 64 tokens has 3 blocks"):
        dummy_prefill_chunks(Bucket(1, 64, 3), limits)
    assert dummy_prefill_chunks(Bucket(2, 64, 3), limits) == [(0, 64), (96, 1)]
    assert dummy_decode_lengths(Bucket(3, 1, 8), limits) == [95, 95, 63]
