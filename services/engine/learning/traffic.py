"""Judge plans by simulated traffic: how much they pad, how long steps take, by the real scheduler."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from services.engine.bucketing import Bucket, BucketLimits, BucketPlan
from services.engine.kv import BlockPool
from services.engine.learning.learn import Budget, learn_buckets
from services.engine.learning.lengths import SequenceLengths, clipped
from services.engine.learning.steptime import StepTimes
from services.engine.scheduler import (
    Finished,
    Scheduler,
    SchedulerConfig,
    SequenceParams,
    SequenceRefused,
    StepPlan,
)
from services.engine.scheduler import Sequence as LiveSequence

# Of what the engine can serve at the most: from a quiet night to a busy day.
LOADS: Final = (0.3, 0.6, 0.9)
_SATURATING: Final = 400


class ExactShapes(BucketPlan):
    """A plan in which every forward within the limits is its own bucket: nothing is padded but rows' ends."""

    def __init__(self, limits: BucketLimits) -> None:
        rows = min(limits.max_num_seqs, limits.max_distinct_decode_blocks)
        super().__init__(
            [Bucket(limits.max_prefill_seqs, limits.max_query, limits.max_context_blocks)],
            [Bucket(rows, 1, limits.max_distinct_decode_blocks)],
            limits.block_size,
        )
        self._budget = limits.max_num_batched_tokens

    def prefill_bucket(self, batch: int, query: int, context_blocks: int) -> Bucket | None:
        """Return the shape itself, unless its padded tokens exceed those of a step."""
        within = batch * query <= self._budget and super().prefill_bucket(batch, query, context_blocks)
        return Bucket(batch, query, context_blocks) if within else None

    def decode_bucket(self, batch: int, blocks: int) -> Bucket | None:
        """Return the shape itself."""
        return Bucket(batch, 1, blocks)


@dataclass(slots=True)
class Trace:
    """Steps of a run: how often each real shape ran in each bucket. `real_tokens` are prefill's, unpadded.

    Seconds are simulated: `seconds` is the clock, `seconds_busy` the sum of the steps.
    """

    steps: int = 0
    seconds: float = 0.0
    seconds_busy: float = 0.0
    finished: int = 0
    refused: int = 0
    real_tokens: int = 0
    prefill: Counter[tuple[Bucket, Bucket]] = field(default_factory=Counter)
    decode: Counter[tuple[Bucket, Bucket]] = field(default_factory=Counter)

    def shapes(self, *, decode: bool) -> Counter[Bucket]:
        """Return how often each real shape occurred."""
        found: Counter[Bucket] = Counter()
        for (shape, _), count in (self.decode if decode else self.prefill).items():
            found[shape] += count
        return found


def run_traffic(
    plan: BucketPlan,
    lengths: Sequence[SequenceLengths],
    limits: BucketLimits,
    times: StepTimes,
    *,
    rate: float,
    seed: int,
) -> Trace:
    """Serve the sequences in their order, arriving at random moments, `rate` a second on average.

    Steps take what `times` says of their buckets. Every sequence runs to its end. Sequences that the engine
    would refuse are counted as refused.
    """
    trace = Trace()
    scheduler = _scheduler(plan, limits, waiting=len(lengths))
    draw = random.Random(seed)
    arrival = 0.0
    for key, item in enumerate(clipped(lengths, limits.max_model_len)):
        arrival += draw.expovariate(rate)
        while trace.seconds < arrival and scheduler.has_work:
            _step(scheduler, trace, limits, times)
        trace.seconds = max(trace.seconds, arrival)
        sequence = LiveSequence(
            key,
            [0] * item.prompt_tokens,
            item.prompt_tokens,
            SequenceParams(max_tokens=item.output_tokens),
        )
        try:
            scheduler.add(sequence)
        except SequenceRefused:
            trace.refused += 1
    while scheduler.has_work:
        _step(scheduler, trace, limits, times)
    trace.refused += len(lengths) - len(clipped(lengths, limits.max_model_len))
    return trace


def run_loads(
    plan: BucketPlan,
    lengths: Sequence[SequenceLengths],
    limits: BucketLimits,
    times: StepTimes,
    *,
    seed: int,
    loads: Sequence[float] = LOADS,
    capacity: float,
) -> Trace:
    """Serve one share of the sequences after the other, each at one of the loads.

    Loads are shares of `capacity`, which is in sequences a second.
    """
    total = Trace()
    for index, load in enumerate(loads):
        part = lengths[index :: len(loads)]
        run = run_traffic(plan, part, limits, times, rate=load * capacity, seed=seed + index)
        total.steps += run.steps
        total.seconds += run.seconds
        total.seconds_busy += run.seconds_busy
        total.finished += run.finished
        total.refused += run.refused
        total.real_tokens += run.real_tokens
        total.prefill += run.prefill
        total.decode += run.decode
    return total


def capacity_of(
    plan: BucketPlan, lengths: Sequence[SequenceLengths], limits: BucketLimits, times: StepTimes
) -> float:
    """Return sequences a second that an engine with this plan ends while more always wait."""
    trace = run_traffic(plan, lengths[:_SATURATING], limits, times, rate=1e9, seed=0)
    if not trace.finished:
        raise ValueError("the engine would refuse every sequence of the length file")
    return trace.finished / trace.seconds


def _scheduler(plan: BucketPlan, limits: BucketLimits, *, waiting: int) -> Scheduler:
    config = SchedulerConfig(
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_waiting=waiting,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_prefill_seqs=limits.max_prefill_seqs,
    )
    return Scheduler(config, BlockPool(limits.num_blocks, limits.block_size), plan)


def _step(scheduler: Scheduler, trace: Trace, limits: BucketLimits, times: StepTimes) -> None:
    plan = scheduler.plan()
    if plan is None:
        raise ValueError("the scheduler has work and plans nothing")
    _count(plan, trace, limits, times)
    outcomes = scheduler.commit(plan, {sequence.key: 0 for sequence in plan.sampling()})
    trace.finished += sum(isinstance(outcome, Finished) for outcome in outcomes)


def _count(plan: StepPlan, trace: Trace, limits: BucketLimits, times: StepTimes) -> None:
    size = limits.block_size
    seconds = 0.0
    if plan.bucket_prefill is not None:
        query = max(chunk.length for chunk in plan.prefills)
        context = max(-(-chunk.start // size) for chunk in plan.prefills)
        trace.prefill[Bucket(len(plan.prefills), query, context), plan.bucket_prefill] += 1
        trace.real_tokens += sum(chunk.length for chunk in plan.prefills)
        seconds += times.prefill(plan.bucket_prefill)
    if plan.bucket_decode is not None:
        blocks = sum(row.position // size + 1 for row in plan.decodes)
        trace.decode[Bucket(len(plan.decodes), 1, blocks), plan.bucket_decode] += 1
        seconds += times.decode(plan.bucket_decode)
    trace.steps += 1
    trace.seconds_busy += seconds
    trace.seconds += seconds


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
        """Measure the capacity. Raises ValueError if the engine would refuse every sequence."""
        capacity = capacity_of(ExactShapes(limits), lengths, limits, times)
        return cls(lengths, limits, times, capacity, seed)

    def run(self, plan: BucketPlan) -> Trace:
        """Serve the sequences with this plan."""
        return run_loads(plan, self.lengths, self.limits, self.times, seed=self.seed, capacity=self.capacity)


def learn_for(workload: Workload, budget: Budget, compiled: Sequence[Bucket] = ()) -> list[Bucket]:
    """Learn buckets for a workload, from what its steps would be without padding."""
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
    """Serve the workload with this plan and adds up the padding."""
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
