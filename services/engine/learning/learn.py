"""Learn buckets: those with the least expected step time for a workload, within a budget of graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from services.engine.bucketing import Bucket, BucketLimits, split_by_limits
from services.engine.learning.phases import decode_curve, prefill_curve
from services.engine.learning.steptime import StepTimes


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs in seconds. `seconds` is the time of all steps without padding."""

    times: StepTimes
    seconds: float
    token: float
    row: float
    block: float

    def prefill(self, bucket: Bucket) -> float:
        """Cost of a prefill forward."""
        return self.times.prefill(bucket) + self.token * bucket.batch * bucket.query

    def decode(self, bucket: Bucket) -> float:
        """Cost of a decode forward."""
        return self.times.decode(bucket) + self.row * bucket.batch + self.block * bucket.context_blocks


def priced(
    times: StepTimes, prefill: Counter[Bucket], decode: Counter[Bucket], padding_price: float
) -> StepCosts:
    """Return the costs for these counts of real shapes.

    A phase that pads all its tokens, rows or blocks by 100 % costs `padding_price` of its time more than its
    padding takes.
    """
    prefill_s = sum(times.prefill(bucket) * count for bucket, count in prefill.items())
    decode_s = sum(times.decode(bucket) * count for bucket, count in decode.items())
    tokens = sum(bucket.batch * bucket.query * count for bucket, count in prefill.items())
    rows = sum(bucket.batch * count for bucket, count in decode.items())
    blocks = sum(bucket.context_blocks * count for bucket, count in decode.items())
    return StepCosts(
        times,
        prefill_s + decode_s,
        token=padding_price * prefill_s / max(1, tokens),
        row=padding_price * decode_s / max(1, rows),
        block=padding_price * decode_s / max(1, blocks),
    )


# Beyond so many graphs of a phase, another one saves next to nothing, and finding it takes long.
_MOST_GRAPHS: Final = 512


@dataclass(frozen=True, slots=True)
class Budget:
    """A limit of captured graphs: their number, or their bytes. One of the two is set.

    The bytes of a graph are those of an average one of its phase. `new_graph_price` is the share of the
    workload's time that a graph has to save to be worth it, unless it is compiled already. `padding_price` is
    what a padding of 100 % costs beyond the time that the step-time model sees, as a share of the phase's
    time: the model calls rows free while the weights are being read, and nothing is that free.
    """

    graphs: int | None = None
    graph_bytes: int | None = None
    prefill_graph_bytes: int = 1
    decode_graph_bytes: int = 1
    new_graph_price: float = 0.0
    padding_price: float = 0.1

    def __post_init__(self) -> None:
        if (self.graphs is None) == (self.graph_bytes is None):
            raise ValueError("a budget is of graphs or of graph bytes")
        if self.prefill_graph_bytes < 1 or self.decode_graph_bytes < 1:
            raise ValueError("a graph has at least 1 byte")
        if self.new_graph_price < 0 or self.padding_price < 0:
            raise ValueError("prices must not be negative")
        least = self.prefill_graph_bytes + self.decode_graph_bytes
        if self.graphs is not None and self.graphs < 2:
            raise ValueError(f"each phase needs a graph, so {self.graphs} are too few")
        if self.graph_bytes is not None and self.graph_bytes < least:
            raise ValueError(
                f"a graph of each phase needs {least} bytes, and the budget is {self.graph_bytes}"
            )

    def prefill_graphs(self) -> int:
        """Most prefill graphs, if decode has one."""
        if self.graph_bytes is None:
            return min(_MOST_GRAPHS, (self.graphs or 0) - 1)
        return min(_MOST_GRAPHS, (self.graph_bytes - self.decode_graph_bytes) // self.prefill_graph_bytes)

    def decode_graphs(self, prefill: int) -> int:
        """Most decode graphs with so many of prefill."""
        if self.graph_bytes is None:
            return min(_MOST_GRAPHS, (self.graphs or 0) - prefill)
        return min(
            _MOST_GRAPHS, (self.graph_bytes - prefill * self.prefill_graph_bytes) // self.decode_graph_bytes
        )


def learn_buckets(
    prefill: Counter[Bucket],
    decode: Counter[Bucket],
    limits: BucketLimits,
    times: StepTimes,
    budget: Budget,
    *,
    compiled: Iterable[Bucket] = (),
) -> list[Bucket]:
    """Return the buckets of both phases for these counts of real shapes, sorted. A query of 1 means decode.

    Optimal, for the steps as counted, are the staircase over rows and blocks of decode, the cut of prefill's
    rows with a staircase over query and context in each interval, and the split of the budget between the
    phases. That is over candidate values, which are those seen, thinned to the ones that matter, and given
    the last bucket of each phase, which covers everything. Buckets in `compiled` are candidates too and cost
    no price; keeping them is not free of the budget. An engine whose steps have one token gets no prefill
    buckets: a list has no way to say them.
    """
    old_prefill, old_decode, _ = split_by_limits(compiled, limits)
    known = {*old_prefill, *old_decode}
    costs = priced(times, prefill, decode, budget.padding_price)

    def price(bucket: Bucket) -> float:
        return 0.0 if bucket in known else budget.new_graph_price * costs.seconds

    # The last bucket of each phase is one of its graphs.
    most = budget.prefill_graphs() - 1
    first = prefill_curve(prefill, limits, costs.prefill, compiled=old_prefill, price=price, most=most)
    most = budget.decode_graphs(1) - 1
    second = decode_curve(decode, limits, costs.decode, compiled=old_decode, price=price, most=most)
    best, chosen = np.inf, (0, 0)
    for count, cost in enumerate(first.cost_of):
        room = budget.decode_graphs(count + 1)
        if room < 1:
            break
        other = int(second.cost_of[:room].argmin())
        if cost + second.cost_of[other] < best:
            best, chosen = cost + second.cost_of[other], (count, other)
    found = {*first.buckets(chosen[0]), first.last} if limits.max_query > 1 else set()
    return sorted({*found, *second.buckets(chosen[1]), second.last})
