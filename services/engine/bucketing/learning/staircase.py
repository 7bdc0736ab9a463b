"""The best buckets over ordered axes, by dynamic programming.

A staircase over two axes cuts the outer axis into intervals and gives each its own list of inner values: the
buckets (end of the interval, inner value). A point is served by the bucket of its interval whose inner value
is the next one up, or, if the list ends below it, by a last bucket that covers everything. Of all staircases
over the given candidate values, with a given number of buckets, `Staircase` finds one of least cost, exactly.
Shared inner values (a grid) are a special case and never better, and so is alternating between the axes.
A third axis is put outside by giving `Partition` the curves of staircases.

Costs are of float64. All arrays are indexed by candidates, rising.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
        """The intervals of the best cut with exactly so many buckets. Raises ValueError if there is none."""
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
        """The buckets of the best staircase with exactly `count`, as indexes (outer, inner), rising."""
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
