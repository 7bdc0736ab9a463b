"""The best buckets of one phase for every number of graphs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from services.engine.bucketing.bucket import Bucket
from services.engine.bucketing.coverage import missing_decode, missing_prefill
from services.engine.bucketing.exponential import exponential_ranges
from services.engine.bucketing.learning.candidates import thinned
from services.engine.bucketing.learning.staircase import Floats, Partition, Staircase
from services.engine.bucketing.limits import BucketLimits

Points = dict[Bucket, float]
Measure = Callable[[Bucket], float]

_OUTER: Final = 40
_INNER: Final = 80
_PREFILL_ROWS: Final = 6
_QUERIES: Final = 64
_CONTEXTS: Final = 20
# Most inner values of one outer interval.
_WIDTH: Final = 16
# Share of the steps that is spread over all that could happen, so that traffic that was not seen while
# learning does not run in the largest bucket.
_UNSEEN: Final = 0.003
_UNSEEN_LEVELS: Final = 6
# Share of each decode shape that is moved to each of two that are so much larger: the next day may be busier.
_BUSIER: Final = 0.03
_GROWTH: Final = 1.25


@dataclass(frozen=True, slots=True)
class PhaseCurve:
    """The least cost with 0, 1, ... buckets beside the last one, which covers everything, and those buckets.

    `cost_of` is that of all steps together and the prices of the buckets, inf if there is no such
    plan; the last bucket's price is not in it.
    """

    cost_of: Floats
    buckets: Callable[[int], list[Bucket]]
    last: Bucket


def decode_curve(
    shapes: Counter[Bucket],
    limits: BucketLimits,
    cost: Measure,
    *,
    compiled: Sequence[Bucket],
    price: Measure,
    most: int,
) -> PhaseCurve:
    """The best staircases over rows and blocks for these counts of real decode shapes."""
    last = _last_decode(limits)
    points = _with_unseen(_busier(shapes, last, limits), _unseen_decode(last, limits))
    rows = _axis(points, "batch", _OUTER, keep=[last, *compiled])
    blocks = _axis(points, "context_blocks", _INNER, keep=[last, *compiled])
    weights = np.zeros((len(rows), len(blocks)))
    for bucket, weight in points.items():
        weights[np.searchsorted(rows, bucket.batch), np.searchsorted(blocks, bucket.context_blocks)] += weight
    longest = last.context_blocks if limits.contiguous else limits.blocks_per_sequence
    grid = [[Bucket(row, 1, min(block, row * longest)) for block in blocks] for row in rows]

    def allowed(bucket: Bucket) -> bool:
        return limits.contiguous or bucket.batch <= bucket.context_blocks

    best = Staircase(
        weights,
        np.array([[cost(bucket) for bucket in line] for line in grid]),
        np.array([[price(bucket) if allowed(bucket) else np.inf for bucket in line] for line in grid]),
        np.full(weights.shape, cost(last)),
        most=most,
        width=_WIDTH,
    )
    return PhaseCurve(best.costs, lambda count: [grid[i][j] for i, j in best.buckets(count)], last)


def prefill_curve(
    shapes: Counter[Bucket],
    limits: BucketLimits,
    cost: Measure,
    *,
    compiled: Sequence[Bucket],
    price: Measure,
    most: int,
) -> PhaseCurve:
    """The best cut of the rows with the best staircases over query and context in each interval of it."""
    last = missing_prefill((), limits)[0]
    points = _with_unseen(shapes, _unseen_prefill(limits))
    rows = _axis(points, "batch", _PREFILL_ROWS, keep=[last, *compiled])
    # In a bucket file a query of 1 means decode, so a single token is prefilled as two.
    least = min(2, limits.max_query)
    queries = sorted(
        {max(least, query) for query in _axis(points, "query", _QUERIES, keep=[last, *compiled])}
    )
    contexts = _axis(points, "context_blocks", _CONTEXTS, keep=[last, *compiled])
    weights = np.zeros((len(rows), len(queries), len(contexts)))
    for bucket, weight in points.items():
        at = zip((rows, queries, contexts), (bucket.batch, bucket.query, bucket.context_blocks), strict=True)
        weights[tuple(np.searchsorted(axis, value) for axis, value in at)] += weight
    intervals = np.full((len(rows), len(rows) + 1, most + 1), np.inf)
    found: dict[tuple[int, int], Staircase] = {}
    for end, batch in enumerate(rows, start=1):
        grid = [[Bucket(batch, query, context) for context in contexts] for query in queries]
        costs = np.array([[cost(bucket) for bucket in line] for line in grid])
        budget = limits.max_num_batched_tokens
        prices = np.array(
            [[price(b) if b.batch * b.query <= budget else np.inf for b in line] for line in grid]
        )
        for begin in range(end):
            part = weights[begin:end].sum(axis=0)
            # What has no bucket for its rows runs row by row in the last one.
            alone = (weights[begin:end] * np.array(rows[begin:end])[:, None, None]).sum(axis=0)
            overflow = np.divide(alone, part, out=np.ones_like(part), where=part > 0) * cost(last)
            best = Staircase(part, costs, prices, overflow, most=most, width=_WIDTH)
            found[begin, end] = best
            intervals[begin, end] = best.costs
    cuts = Partition(intervals, most)

    def buckets(count: int) -> list[Bucket]:
        return [
            Bucket(rows[part.end - 1], queries[query], contexts[context])
            for part in cuts.cut(count)
            for query, context in found[part.begin, part.end].buckets(part.buckets)
        ]

    return PhaseCurve(cuts.costs, buckets, last)


def _last_decode(limits: BucketLimits) -> Bucket:
    """The bucket that covers every decode batch, also one whose sequences share blocks beyond the pool's."""
    last = missing_decode((), limits)[0]
    blocks = max(last.context_blocks, exponential_ranges(limits).decode_blocks.maximum)
    rows = limits.max_num_seqs if limits.contiguous else min(limits.max_num_seqs, blocks)
    return Bucket(rows, 1, blocks)


def _axis(points: Points, name: str, most: int, *, keep: Sequence[Bucket]) -> list[int]:
    """The candidate values of one axis."""
    weights: dict[int, float] = {}
    for bucket, weight in points.items():
        value = getattr(bucket, name)
        weights[value] = weights.get(value, 0.0) + weight
    return thinned(weights, most, keep={getattr(bucket, name) for bucket in keep})


def _busier(shapes: Counter[Bucket], last: Bucket, limits: BucketLimits) -> Points:
    """The shapes, of each a share in more rows with more blocks, and one with more blocks in its rows."""
    points: Points = {}

    def add(batch: int, blocks: float, weight: float) -> None:
        most = last.context_blocks
        if not limits.contiguous:
            most = min(most, batch * limits.blocks_per_sequence)
        bucket = Bucket(batch, 1, min(math.ceil(blocks), most))
        points[bucket] = points.get(bucket, 0.0) + weight

    for shape, count in shapes.items():
        add(shape.batch, shape.context_blocks, count * (1 - 2 * _BUSIER))
        larger = min(math.ceil(shape.batch * _GROWTH), last.batch)
        add(larger, shape.context_blocks * larger / shape.batch, count * _BUSIER)
        add(shape.batch, shape.context_blocks * _GROWTH, count * _BUSIER)
    return points


def _with_unseen(shapes: Mapping[Bucket, float], unseen: Sequence[Bucket]) -> Points:
    points: Points = dict(shapes)
    weight = max(1.0, sum(shapes.values())) * _UNSEEN / len(unseen)
    for bucket in unseen:
        points[bucket] = points.get(bucket, 0.0) + weight
    return points


def _unseen_decode(last: Bucket, limits: BucketLimits) -> list[Bucket]:
    """Batches of all sizes, whose rows have from one block to the most that a row can have."""
    found = []
    for batch in _levels(1, last.batch):
        most = min(batch * limits.blocks_per_sequence, last.context_blocks)
        found += [Bucket(batch, 1, blocks) for blocks in _levels(min(batch, most), most)]
    return found


def _unseen_prefill(limits: BucketLimits) -> list[Bucket]:
    """Single chunks of all lengths at all depths that they can have."""
    found = []
    for query in _levels(min(2, limits.max_query), limits.max_query):
        most = limits.context_before(query)
        found += [Bucket(1, query, context) for context in sorted({0, *_levels(min(1, most), most)})]
    return found


def _levels(least: int, most: int) -> list[int]:
    """About geometric values from least to most."""
    if least < 1:
        return [most]
    return sorted({round(value) for value in np.geomspace(least, most, _UNSEEN_LEVELS)})
