"""Learned buckets: optimal where that is claimed, within the budget, covering, better than exponential."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.bucketing import (
    Bucket,
    BucketLimits,
    build_plan,
    covers_every_step,
    format_buckets,
    parse_buckets,
    plan_of,
)
from services.engine.learning import (
    Budget,
    ExactShapes,
    ModelCost,
    Partition,
    Staircase,
    StepTimes,
    Workload,
    assess,
    chat_lengths,
    estimated_times,
    learn_buckets,
    learn_for,
)

LIMITS = BucketLimits(32, 2048, 32, 512, 1024, max_prefill_seqs=3)
COST = ModelCost(
    parameters=135e6, parameter_bytes=2, kv_bytes_per_token=23_040, attention_width=17_280, vocab_size=49_152
)


def times_of(block_size: int = 32) -> StepTimes:
    return estimated_times(
        COST, block_size=block_size, bytes_per_second=2.45e12, flops_per_second=430e12, launch_s=2e-4
    )


def cuts(n: int) -> Iterator[list[tuple[int, int]]]:
    """All ways to cut range(n) into intervals."""
    for size in range(n):
        for inner in combinations(range(1, n), size):
            edges = [0, *inner, n]
            yield list(pairwise(edges))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4), st.integers(0, 6), st.integers(1, 4))
def test_the_staircase_is_the_best_of_all(seed: int, outer: int, inner: int, most: int, width: int) -> None:
    draw = np.random.default_rng(seed)
    weights = draw.integers(0, 5, (outer, inner)).astype(np.float64)
    costs = draw.uniform(0.1, 3, (outer, inner)).cumsum(axis=0).cumsum(axis=1)
    prices = np.where(draw.random((outer, inner)) < 0.2, np.inf, draw.uniform(0, 2, (outer, inner)))
    overflow = np.full((outer, inner), 20.0) * draw.integers(1, 3, (outer, 1)).astype(np.float64)
    found = Staircase(weights, costs, prices, overflow, most=most, width=width)

    def served(begin: int, end: int, chosen: tuple[int, ...]) -> float:
        total = sum(float(prices[end - 1, at]) for at in chosen)
        for row in range(begin, end):
            for column in range(inner):
                at = next((value for value in chosen if value >= column), None)
                cost = overflow[row, column] if at is None else costs[end - 1, at]
                total += weights[row, column] * cost
        return total

    best = np.full(most + 1, np.inf)
    lists = [c for size in range(min(width, inner) + 1) for c in combinations(range(inner), size)]
    options = {
        (begin, end): [(len(c), served(begin, end, c)) for c in lists]
        for begin in range(outer)
        for end in range(begin + 1, outer + 1)
    }
    for cut in cuts(outer):
        totals = {0: 0.0}
        for interval in cut:
            following: dict[int, float] = {}
            for used, before in totals.items():
                for count, cost in options[interval]:
                    if used + count <= most:
                        key = used + count
                        following[key] = min(following.get(key, np.inf), before + cost)
            totals = following
        for count, cost in totals.items():
            best[count] = min(best[count], cost)
    np.testing.assert_allclose(found.costs, best, rtol=1e-9)
    for count in range(most + 1):
        if np.isfinite(best[count]):
            buckets = found.buckets(count)
            assert len(buckets) == len(set(buckets)) == count
        else:
            with pytest.raises(ValueError, match="no cut has exactly"):
                found.buckets(count)


def test_a_partition_names_its_intervals() -> None:
    costs = np.full((3, 4, 3), 10.0)
    costs[0, 1, 1] = costs[1, 3, 2] = 1.0
    found = Partition(costs, 4)
    assert found.costs[3] == 2.0
    assert [(p.begin, p.end, p.buckets) for p in found.cut(3)] == [(0, 1, 1), (1, 3, 2)]


@cache
def workload(seed: int, sequences: int = 250) -> Workload:
    return Workload.of(chat_lengths(seed, sequences), LIMITS, times_of(), seed=seed)


def test_a_learned_plan_pads_at_most_half_of_what_exponential_does() -> None:
    exponential = build_plan("exponential", LIMITS)
    graphs = len(exponential.prefill) + len(exponential.decode)
    learned = plan_of(learn_for(workload(1), Budget(graphs=graphs)), LIMITS)
    assert len(learned.prefill) + len(learned.decode) <= graphs
    assert covers_every_step(learned, LIMITS)
    ours, theirs = assess(learned, workload(2)), assess(exponential, workload(2))
    assert ours.decode_row_padding <= theirs.decode_row_padding / 2
    assert ours.decode_block_padding <= theirs.decode_block_padding / 2
    assert ours.decode_padding <= theirs.decode_padding / 2
    assert ours.query_padding <= theirs.query_padding
    assert ours.step_time <= theirs.step_time


def test_exact_shapes_pad_nothing_but_the_ends_of_rows() -> None:
    found = assess(ExactShapes(LIMITS), workload(2))
    assert found.decode_row_padding == found.decode_block_padding == 0
    assert 0 <= found.query_padding < 0.05
    assert found.trace.finished + found.trace.refused == 250


shapes = st.dictionaries(
    st.builds(Bucket, st.integers(1, 32), st.just(1), st.integers(32, 800)),
    st.integers(1, 50),
    min_size=1,
    max_size=12,
)
chunks = st.dictionaries(
    st.builds(Bucket, st.integers(1, 3), st.integers(1, 170), st.integers(0, 20)),
    st.integers(1, 50),
    min_size=1,
    max_size=12,
)


@settings(max_examples=15, deadline=None)
@given(chunks, shapes, st.integers(2, 60))
def test_what_is_learned_covers_fits_the_budget_and_reads_back(
    prefill: dict[Bucket, int], decode: dict[Bucket, int], graphs: int
) -> None:
    buckets = learn_buckets(Counter(prefill), Counter(decode), LIMITS, times_of(), Budget(graphs=graphs))
    assert len(buckets) <= graphs
    plan = plan_of(parse_buckets(format_buckets(buckets)), LIMITS)
    assert not plan.omitted
    assert sorted([*plan.prefill, *plan.decode]) == buckets
    assert covers_every_step(plan, LIMITS)
    for shape in decode:
        assert plan.decode_bucket(shape.batch, shape.context_blocks) is not None


@pytest.mark.parametrize(
    "limits",
    [
        BucketLimits(784, 131_072, 3, 2048, 400),
        BucketLimits(528, 131_071, 16, 512, 300, contiguous=True),
        BucketLimits(16, 17, 1, 1, 2),
        BucketLimits(16, 2, 4, 8, 4, max_prefill_seqs=8),
        BucketLimits(48, 1000, 300, 300, 100),
    ],
)
def test_odd_engines_are_covered(limits: BucketLimits) -> None:
    decode = Counter({Bucket(1, 1, 1): 3})
    prefill = Counter({Bucket(1, limits.max_query, 0): 3})
    buckets = learn_buckets(prefill, decode, limits, times_of(limits.block_size), Budget(graphs=12))
    plan = plan_of(buckets, limits)
    assert not plan.omitted
    assert covers_every_step(plan, limits)
    for query in {1, limits.max_query}:
        assert plan.prefill_bucket(1, query, limits.context_before(query)) is not None
    for batch in range(1, plan.max_decode_batch + 1):
        most = min(plan.max_decode_blocks, batch * limits.blocks_per_sequence)
        assert plan.decode_bucket(batch, max(batch, most)) is not None or batch > most


def test_unseen_traffic_does_not_run_in_the_largest_bucket() -> None:
    seen = Counter({Bucket(8, 1, 80): 1000})
    buckets = learn_buckets(Counter({Bucket(1, 100, 0): 99}), seen, LIMITS, times_of(), Budget(graphs=80))
    plan = plan_of(buckets, LIMITS)
    found = plan.decode_bucket(20, 60)
    assert found is not None
    assert found.context_blocks < plan.max_decode_blocks / 2
    chunk = plan.prefill_bucket(1, 400, 0)
    assert chunk is not None
    assert chunk.context_blocks < plan.max_prefill_context / 2


def test_relearning_keeps_what_is_compiled_if_new_graphs_have_a_price() -> None:
    trace = workload(1).run(ExactShapes(LIMITS))
    prefill, decode = trace.shapes(decode=False), trace.shapes(decode=True)
    compiled = learn_buckets(prefill, decode, LIMITS, times_of(), Budget(graphs=40))
    other = workload(5).run(ExactShapes(LIMITS))
    shifted = other.shapes(decode=False), other.shapes(decode=True)
    new = {}
    for price in (0.0, 0.001, 10.0):
        found = learn_buckets(
            *shifted, LIMITS, times_of(), Budget(graphs=60, new_graph_price=price), compiled=compiled
        )
        new[price] = len(set(found) - set(compiled))
    assert new[10.0] == 0
    assert 0 < new[0.001] < new[0.0]


def test_a_budget_of_bytes_buys_more_of_the_small_graphs() -> None:
    trace = workload(1).run(ExactShapes(LIMITS))
    budget = Budget(graph_bytes=1000, prefill_graph_bytes=50, decode_graph_bytes=5)
    found = learn_buckets(trace.shapes(decode=False), trace.shapes(decode=True), LIMITS, times_of(), budget)
    decode = sum(bucket.query == 1 for bucket in found)
    assert (len(found) - decode) * 50 + decode * 5 <= 1000
    assert decode > 20


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"graphs": 4, "graph_bytes": 100},
        {"graphs": 1},
        {"graph_bytes": 1},
        {"graphs": 5, "prefill_graph_bytes": 0},
        {"graphs": 5, "new_graph_price": -1.0},
        {"graphs": 5, "padding_price": -1.0},
    ],
)
def test_senseless_budgets_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        Budget(**bad)  # type: ignore[arg-type]
