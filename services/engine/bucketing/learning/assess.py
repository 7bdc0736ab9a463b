"""Judges plans: how much they pad and how long a step takes, on the same sequences at the same loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.engine.bucketing.bucket import Bucket
from services.engine.bucketing.learning.learn import Budget, learn_buckets
from services.engine.bucketing.learning.lengths import SequenceLengths
from services.engine.bucketing.learning.steptime import StepTimes
from services.engine.bucketing.learning.traffic import ExactShapes, Trace, capacity_of, run_loads
from services.engine.bucketing.limits import BucketLimits
from services.engine.bucketing.plan import BucketPlan


@dataclass(frozen=True, slots=True)
class Assessment:
    """A plan under a workload. Padding is (padded - real) / real, over all steps.

    `query_padding` counts tokens of prefill forwards, rows that are empty included, and
    `decode_row_padding` and `decode_block_padding` rows and KV blocks of decode forwards; `decode_padding` is
    the mean of these two. `step_time` is the mean time of a step in seconds.
    """

    prefill_graphs: int
    decode_graphs: int
    query_padding: float
    decode_row_padding: float
    decode_block_padding: float
    step_time: float
    steps: int
    trace: Trace

    @property
    def graphs(self) -> int:
        """Buckets of both phases."""
        return self.prefill_graphs + self.decode_graphs

    @property
    def decode_padding(self) -> float:
        """The mean of the padding of rows and of blocks."""
        return (self.decode_row_padding + self.decode_block_padding) / 2


@dataclass(frozen=True, slots=True)
class Workload:
    """Sequences and the engine that serves them. `capacity` is in sequences a second, without padding."""

    lengths: Sequence[SequenceLengths]
    limits: BucketLimits
    times: StepTimes
    capacity: float
    seed: int

    @classmethod
    def of(
        cls, lengths: Sequence[SequenceLengths], limits: BucketLimits, times: StepTimes, *, seed: int
    ) -> Workload:
        """Measures the capacity. Raises ValueError if the engine would refuse every sequence."""
        capacity = capacity_of(ExactShapes(limits), lengths, limits, times)
        return cls(lengths, limits, times, capacity, seed)

    def run(self, plan: BucketPlan) -> Trace:
        """Serves the sequences with this plan."""
        return run_loads(plan, self.lengths, self.limits, self.times, seed=self.seed, capacity=self.capacity)


def learn_for(workload: Workload, budget: Budget, compiled: Sequence[Bucket] = ()) -> list[Bucket]:
    """Learns buckets for a workload, from what its steps would be without padding."""
    trace = workload.run(ExactShapes(workload.limits))
    return learn_buckets(
        trace.shapes(decode=False),
        trace.shapes(decode=True),
        workload.limits,
        workload.times,
        budget,
        compiled=compiled,
    )


def assess(plan: BucketPlan, workload: Workload) -> Assessment:
    """Serves the workload with this plan and adds up the padding."""
    trace = workload.run(plan)
    rows = _padding(trace, "batch")
    blocks = _padding(trace, "context_blocks")
    computed = sum(used.batch * used.query * count for (_, used), count in trace.prefill.items())
    return Assessment(
        prefill_graphs=len(plan.prefill),
        decode_graphs=len(plan.decode),
        query_padding=_share(computed, trace.real_tokens),
        decode_row_padding=rows,
        decode_block_padding=blocks,
        step_time=trace.seconds_busy / max(1, trace.steps),
        steps=trace.steps,
        trace=trace,
    )


def _padding(trace: Trace, name: str) -> float:
    real = sum(getattr(shape, name) * count for (shape, _), count in trace.decode.items())
    used = sum(getattr(bucket, name) * count for (_, bucket), count in trace.decode.items())
    return _share(used, real)


def _share(used: int, real: int) -> float:
    return used / real - 1 if real else 0.0
