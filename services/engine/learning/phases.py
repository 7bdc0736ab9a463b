"""The best buckets of one phase for every number of graphs, by dynamic programming over ordered axes.

A staircase over two axes cuts the outer axis into intervals and gives each its own list of inner values: the
buckets (end of the interval, inner value). A point is served by the bucket of its interval whose inner value
is the next one up, or, if the list ends below it, by a last bucket that covers everything. Of all staircases
over the given candidate values, with a given number of buckets, `Staircase` finds one of least cost, exactly.
Shared inner values (a grid) are a special case and never better, and so is alternating between the axes.
A third axis is put outside by giving `Partition` the curves of staircases.

Costs are of float64. All arrays are indexed by candidates, rising.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from services.engine.bucketing import (
    Bucket,
    BucketLimits,
    Exponential,
    PaddingOptions,
    missing_decode,
    missing_prefill,
)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """Candidates [begin, end) of an axis, and how many buckets they have of their own."""

    begin: int
    end: int
    buckets: int


class Partition:
    """The best ways to cut an axis of n candidates into intervals, for every number of buckets.

    `intervals` [n, n + 1, m + 1]: the cost of the interval [begin, end) with 0 .. m buckets of its own.
    `costs` [most + 1]: the least total cost with exactly so many buckets, inf where there is none.
    """

    def __init__(self, intervals: Floats, most: int) -> None:
        n, width = intervals.shape[0], intervals.shape[2]
        total = np.full((n + 1, most + 1), np.inf)
        total[0, 0] = 0.0
        self._begin = np.zeros((n + 1, most + 1), dtype=np.int64)
        self._count = np.zeros((n + 1, most + 1), dtype=np.int64)
        for end in range(1, n + 1):
            for count in range(min(width - 1, most) + 1):
                # [begin, k]: `count` of the k buckets are this interval's.
                candidate = total[:end, : most + 1 - count] + intervals[:end, end, count, None]
                begin = candidate.argmin(axis=0)
                value = candidate[begin, np.arange(candidate.shape[1])]
                better = value < total[end, count:]
                total[end, count:][better] = value[better]
                self._begin[end, count:][better] = begin[better]
                self._count[end, count:][better] = count
        self.costs = total[n]

    def cut(self, buckets: int) -> list[Interval]:
        """Return the intervals of the best cut with exactly so many buckets.

        Raises ValueError if there is none.
        """
        if not np.isfinite(self.costs[buckets]):
            raise ValueError(f"no cut has exactly {buckets} buckets")
        found: list[Interval] = []
        end = self._begin.shape[0] - 1
        while end:
            begin, count = int(self._begin[end, buckets]), int(self._count[end, buckets])
            found.append(Interval(begin, end, count))
            end, buckets = begin, buckets - count
        return found[::-1]


class Staircase:
    """The best staircases, for every number of buckets up to `most`.

    `weights` [outer, inner] of the points; `costs` and `prices` [outer, inner]: what each point costs in a
    bucket, and what the bucket costs itself, inf for one that is not allowed; `overflow` [outer, inner]: what
    each point costs in the last bucket. An interval has up to `width` buckets. The attribute `costs`
    [most + 1] is the least total cost with exactly so many buckets.
    """

    def __init__(
        self, weights: Floats, costs: Floats, prices: Floats, overflow: Floats, *, most: int, width: int
    ) -> None:
        outer, inner = weights.shape
        width = min(width, inner, most)
        self._sums = np.concatenate([np.zeros((1, inner)), weights.cumsum(axis=0)])
        self._rest = np.concatenate([np.zeros((1, inner)), (weights * overflow).cumsum(axis=0)])
        self._bucket_costs, self._prices = costs, prices
        curves = np.full((outer, outer + 1, width + 1), np.inf)
        for end in range(1, outer + 1):
            levels, _ = _inner(self._sums[end] - self._sums[:end], costs[end - 1], prices[end - 1], width)
            tails = _tails(self._rest[end] - self._rest[:end])
            curves[:end, end] = (levels + tails).min(axis=2).T
        self._partition = Partition(curves, most)
        self.costs = self._partition.costs

    def buckets(self, count: int) -> list[tuple[int, int]]:
        """Return the best staircase's buckets, exactly `count`, as indexes (outer, inner), rising."""
        return [bucket for part in self._partition.cut(count) for bucket in self._buckets_of(part)]

    def _buckets_of(self, part: Interval) -> list[tuple[int, int]]:
        if part.buckets == 0:
            return []
        weights = (self._sums[part.end] - self._sums[part.begin])[None, :]
        row = part.end - 1
        levels, came = _inner(weights, self._bucket_costs[row], self._prices[row], part.buckets)
        tails = _tails((self._rest[part.end] - self._rest[part.begin])[None, :])
        index = int((levels[part.buckets, 0] + tails[0]).argmin())
        found: list[tuple[int, int]] = []
        for level in range(part.buckets, 0, -1):
            found.append((row, index - 1))
            index = int(came[level, 0, index])
        return found[::-1]


def _tails(rows: Floats) -> Floats:
    """[rows, inner + 1]: what the points from each inner index on cost in the last bucket."""
    behind = np.zeros((rows.shape[0], rows.shape[1] + 1))
    behind[:, :-1] = rows[:, ::-1].cumsum(axis=1)[:, ::-1]
    return behind


def _inner(weights: Floats, cost: Floats, price: Floats, width: int) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Least costs of the inner points below each index, for several intervals with the same end at once.

    `weights` [intervals, inner]; `cost` and `price` [inner]. Returns [width + 1, intervals, inner + 1]: with
    exactly so many buckets, the last of which is the one before the index; and the index before that.
    """
    rows, inner = weights.shape
    before = np.zeros((rows, inner + 1))
    before[:, 1:] = weights.cumsum(axis=1)
    levels = np.full((width + 1, rows, inner + 1), np.inf)
    came = np.zeros((width + 1, rows, inner + 1), dtype=np.int64)
    levels[0, :, 0] = 0.0
    # A bucket that is not allowed has an infinite price; its cost is never multiplied with a weight of zero.
    finite = np.where(np.isfinite(price), cost, 0.0)
    later = np.tril(
        np.ones((inner, inner), dtype=bool), -1
    )  # [start, last]: the bucket ends before it starts
    for level in range(1, width + 1):
        # [interval, start, last]: points start .. last are served by the bucket at `last`.
        candidate = levels[level - 1][:, :-1, None] - before[:, :-1, None] * finite[None, None, :]
        candidate[:, later] = np.inf
        start = candidate.argmin(axis=1)
        value = np.take_along_axis(candidate, start[:, None, :], axis=1)[:, 0, :]
        levels[level, :, 1:] = value + before[:, 1:] * finite[None, :] + price[None, :]
        came[level, :, 1:] = start
    return levels, came


def thinned(weights: Mapping[int, float], most: int, *, keep: Collection[int] = ()) -> list[int]:
    """At most `most` of the values, rising, plus those of `keep`; all of them if they are no more.

    A gap between two neighbours is about the same share of the weight and of the logarithmic axis as any
    other: many boundaries where the steps are, and some everywhere.
    """
    values = sorted({*weights, *keep})
    if len(values) <= most:
        return values
    total = sum(weights.values()) or 1.0
    low, high = math.log(values[0] + 1), math.log(values[-1] + 1)
    chosen = {values[-1], *keep}
    before, next_level = 0.0, 0.0
    for value in values:
        before += weights.get(value, 0.0)
        position = 0.7 * before / total + 0.3 * (math.log(value + 1) - low) / (high - low)
        if position * (most - 1) >= next_level:
            chosen.add(value)
            next_level = math.floor(position * (most - 1)) + 1
    return sorted(chosen)


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
    """The least cost with 0, 1, ... buckets besides the last one, which covers everything, and those buckets.

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
    """Return the best staircases over rows and blocks for these counts of real decode shapes."""
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
    """Return the best cut of the rows, with the best staircase over query and context in each interval."""
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
    """Return the bucket that covers every decode batch, also one whose sequences share blocks beyond the
    pool's."""
    last = missing_decode((), limits)[0]
    ranges = Exponential.ranges(limits, PaddingOptions())
    blocks = max(last.context_blocks, ranges.decode_blocks.maximum)
    rows = limits.max_num_seqs if limits.contiguous else min(limits.max_num_seqs, blocks)
    return Bucket(rows, 1, blocks)


def _axis(points: Points, name: str, most: int, *, keep: Sequence[Bucket]) -> list[int]:
    """Return the candidate values of one axis."""
    weights: dict[int, float] = {}
    for bucket, weight in points.items():
        value = getattr(bucket, name)
        weights[value] = weights.get(value, 0.0) + weight
    return thinned(weights, most, keep={getattr(bucket, name) for bucket in keep})


def _busier(shapes: Counter[Bucket], last: Bucket, limits: BucketLimits) -> Points:
    """Return the shapes, a share of each with more rows and blocks, and a share with more blocks alone."""
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
    """Return batches of all sizes, whose rows have from one block to the most that a row can have."""
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
