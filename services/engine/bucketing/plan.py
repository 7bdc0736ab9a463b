"""The buckets of an engine: built from a strategy, completed to cover every step, and matched at run time."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Final

from services.engine.bucketing.axes import AXES, OPTION_PREFIX, BucketAxes, PaddingOptions
from services.engine.bucketing.bucket import Bucket, BucketLimits
from services.engine.bucketing.bucket_file import read_bucket_file
from services.engine.bucketing.grid import (
    decode_grid,
    missing_decode,
    missing_prefill,
    prefill_grid,
    split_by_limits,
)
from services.engine.bucketing.strategy import (
    FILE,
    STRATEGIES,
    BucketRanges,
    check_axes,
    long_name,
    most_of,
)


class BucketTable:
    """Finds, for a forward, the covering bucket with the least work.

    `work` gives a bucket's cost in any unit. It must not fall when a dimension grows: matching stops at the
    first rows and queries whose cost alone is no better than what was found.
    """

    def __init__(self, buckets: Iterable[Bucket], work: Callable[[Bucket], int]) -> None:
        self.buckets = tuple(sorted(set(buckets), key=attrgetter("batch", "query", "context_blocks")))
        if not self.buckets:
            raise ValueError("a phase needs at least one bucket")
        self.max_batch = max(bucket.batch for bucket in self.buckets)
        self.max_query = max(bucket.query for bucket in self.buckets)
        self.max_context_blocks = max(bucket.context_blocks for bucket in self.buckets)
        self._work = work
        # batch -> query -> rising context blocks, keys rising.
        self._contexts: dict[int, dict[int, list[int]]] = {}
        for bucket in self.buckets:
            queries = self._contexts.setdefault(bucket.batch, {})
            queries.setdefault(bucket.query, []).append(bucket.context_blocks)
        self._batches = list(self._contexts)
        self._queries = {batch: list(queries) for batch, queries in self._contexts.items()}

    def match(self, batch: int, query: int, context_blocks: int) -> Bucket | None:
        """Return the covering bucket with the least work, the smallest of equals; None without one."""
        best: Bucket | None = None
        least = 0
        for rows in self._batches[bisect_left(self._batches, batch) :]:
            if best is not None and self._work(Bucket(rows, query, context_blocks)) >= least:
                break
            queries = self._queries[rows]
            for length in queries[bisect_left(queries, query) :]:
                if best is not None and self._work(Bucket(rows, length, context_blocks)) >= least:
                    break
                contexts = self._contexts[rows][length]
                at = bisect_left(contexts, context_blocks)
                if at == len(contexts):
                    continue
                candidate = Bucket(rows, length, contexts[at])
                work = self._work(candidate)
                if best is None or work < least:
                    best, least = candidate, work
        return best


def narrow_limits(limits: BucketLimits, axes: BucketAxes) -> BucketLimits:
    """Return the limits with the operator's bounds on prefill rows and on the length of a chunk."""
    rows = axes.prefill_batch.max
    return replace(
        limits,
        max_prefill_seqs=limits.max_prefill_seqs if rows is None else min(rows, limits.max_prefill_seqs),
        max_chunk=axes.prefill_query.max,
    )


def with_axes(ranges: BucketRanges, axes: BucketAxes, limits: BucketLimits) -> BucketRanges:
    """Return the ranges with the operator's settings in place of the strategy's.

    A maximum beyond what an engine can use ends there. Raises ValueError for a minimum that lies beyond it.
    """
    return BucketRanges(
        **{axis: getattr(ranges, axis).adjusted(axis, getattr(axes, axis), limits) for axis in AXES}
    )


def beyond_limits(axes: BucketAxes, limits: BucketLimits) -> list[str]:
    """Return one line for each maximum beyond what an engine with these limits can use."""
    lines = []
    for axis in AXES:
        maximum = getattr(axes, axis).max
        most, reason = most_of(axis, limits)
        if maximum is not None and maximum > most:
            lines.append(f"{OPTION_PREFIX}{axis} ends at {most} and not at its max {maximum}: {reason}")
    return lines


# So many shapes no machine warms up in a month; a list of them would not fit a host's memory much later.
_MAX_BUCKETS: Final = 2_000_000

# What a token costs in the linear layers, in units of one token attending to one other: about six times the
# hidden size, so 3,456 for a hidden size of 576 and 24,576 for 4,096. Matching needs only the magnitude.
_TOKEN_WORK: Final = 4096


class BucketPlan:
    """All buckets of both phases.

    Every single sequence within the limits has a bucket, and so has every decode batch within
    `max_decode_batch` and `max_decode_blocks`. A prefill of several sequences has one if `prefill_bucket`
    says so. `omitted` are buckets that were asked for and that no step within the limits fills. `notes` say
    what else became of what was asked for, a line each. `axes` are the values of each axis before their
    product was cut to what steps can fill; empty for listed buckets.
    """

    def __init__(
        self,
        prefill: Iterable[Bucket],
        decode: Iterable[Bucket],
        block_size: int,
        omitted: Iterable[Bucket] = (),
        notes: Iterable[str] = (),
        axes: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        def prefill_work(bucket: Bucket) -> int:
            reach = bucket.context_blocks * block_size + bucket.query
            return bucket.batch * bucket.query * (_TOKEN_WORK + reach)

        def decode_work(bucket: Bucket) -> int:
            return bucket.batch * _TOKEN_WORK + bucket.context_blocks * block_size

        self.block_size = block_size
        self.omitted = tuple(omitted)
        self.notes = tuple(notes)
        self.axes = {name: tuple(values) for name, values in (axes or {}).items()}
        self._prefill = BucketTable(prefill, prefill_work)
        self._decode = BucketTable(decode, decode_work)

    @property
    def prefill(self) -> tuple[Bucket, ...]:
        """Prefill buckets, sorted."""
        return self._prefill.buckets

    @property
    def decode(self) -> tuple[Bucket, ...]:
        """Decode buckets, sorted; their query is 1."""
        return self._decode.buckets

    @property
    def max_prefill_batch(self) -> int:
        """Most rows of a prefill forward."""
        return self._prefill.max_batch

    @property
    def max_prefill_query(self) -> int:
        """Longest prefill chunk."""
        return self._prefill.max_query

    @property
    def max_prefill_context(self) -> int:
        """Most context blocks of a prefill row."""
        return self._prefill.max_context_blocks

    @property
    def max_decode_batch(self) -> int:
        """Most rows of a decode forward."""
        return self._decode.max_batch

    @property
    def max_decode_blocks(self) -> int:
        """Largest sum of blocks of a decode forward."""
        return self._decode.max_context_blocks

    def prefill_bucket(self, batch: int, query: int, context_blocks: int) -> Bucket | None:
        """Return the bucket for `batch` chunks of up to `query` tokens after up to `context_blocks` blocks
        each."""
        return self._prefill.match(batch, query, context_blocks)

    def decode_bucket(self, batch: int, blocks: int) -> Bucket | None:
        """Return the bucket for `batch` rows whose sequences hold `blocks` blocks together."""
        return self._decode.match(batch, 1, blocks)


def build_plan(
    strategy: str,
    limits: BucketLimits,
    *,
    padding: PaddingOptions | None = None,
    file: Path | None = None,
    axes: BucketAxes | None = None,
) -> BucketPlan:
    """Build the plan of a named strategy: `padding` takes options, `file` needs a bucket file.

    Raises ValueError, one line, for an unknown name, for a file that is missing or nonsense, and for settings
    of axes that the strategy does not take or that the limits contradict.
    """
    name, axes = long_name(strategy), axes or BucketAxes()
    check_axes(name, axes)
    if name == FILE:
        if file is None:
            raise ValueError("bucketing strategy file needs a bucket file")
        return plan_of(read_bucket_file(file), limits)
    within = narrow_limits(limits, axes)
    ranges = with_axes(STRATEGIES[name].ranges(within, padding or PaddingOptions()), axes, within)
    return plan_from(ranges, within, axes, notes=beyond_limits(axes, limits))


def plan_from(
    ranges: BucketRanges, limits: BucketLimits, axes: BucketAxes | None = None, notes: Iterable[str] = ()
) -> BucketPlan:
    """Build a plan from ranges. A maximum that a range or a filter drops becomes the last value.

    An axis whose maximum an operator set ends there; if that leaves steps without a bucket, one last bucket
    is added to a phase.
    """
    set_by = axes or BucketAxes()
    distinct = limits.max_distinct_decode_blocks
    blocks = ranges.decode_blocks.values()
    if set_by.decode_blocks.max is None:
        blocks = _at_least_to(blocks, max(ranges.decode_blocks.maximum, distinct))
    else:
        blocks = _up_to(blocks, ranges.decode_blocks.maximum)
    # Each row of a gathered decode has a block of its own, so no more rows than blocks.
    rows = limits.max_num_seqs if limits.contiguous else min(limits.max_num_seqs, blocks[-1])
    axis_values = (
        _up_to(ranges.prefill_batch.values(), limits.max_prefill_seqs),
        _up_to(ranges.prefill_query.values(), limits.max_query),
        _up_to(ranges.prefill_context.values(), _end(set_by.prefill_context.max, limits.max_context_blocks)),
        _up_to(ranges.decode_batch.values(), _end(set_by.decode_batch.max, rows)),
        blocks,
    )
    _check_count("prefill", axis_values[:3])
    _check_count("decode", axis_values[3:])
    prefill = prefill_grid(*axis_values[:3], limits)
    decode = decode_grid(*axis_values[3:], limits)
    more = missing_prefill(prefill, limits), missing_decode(decode, limits)
    said = [
        f"no bucket of the axes covers every {phase} step, so {_shape(bucket)} is added: raise max of "
        f"{OPTION_PREFIX}{phase}_{' or '.join(names)}"
        for phase, names, buckets in (
            ("prefill", ("query", "context"), more[0]),
            ("decode", ("batch", "blocks"), more[1]),
        )
        for bucket in buckets
    ]
    return BucketPlan(
        [*prefill, *more[0]],
        [*decode, *more[1]],
        limits.block_size,
        notes=[*notes, *said],
        axes=dict(zip(AXES, axis_values, strict=True)),
    )


def plan_of(buckets: Iterable[Bucket], limits: BucketLimits) -> BucketPlan:
    """Build a plan from listed buckets; those with a query of 1 are for decode.

    Buckets beyond the limits are left out and named in the plan's `omitted`. If the rest does not cover every
    step, one last bucket is added to a phase.
    """
    prefill, decode, omitted = split_by_limits(buckets, limits)
    more = missing_prefill(prefill, limits), missing_decode(decode, limits)
    notes = [
        f"the listed buckets do not cover every {phase} step, so {_shape(bucket)} is added: list one like it"
        for phase, buckets in zip(("prefill", "decode"), more, strict=True)
        for bucket in buckets
    ]
    return BucketPlan([*prefill, *more[0]], [*decode, *more[1]], limits.block_size, omitted, notes)


def covers_every_step(plan: BucketPlan, limits: BucketLimits) -> bool:
    """True if each prefill of one sequence, and each decode batch within the plan's maxima, has a bucket.

    No chunk is longer than the plan's longest.
    """
    within = replace(limits, max_chunk=plan.max_prefill_query)
    return not missing_prefill(plan.prefill, within) and not missing_decode(plan.decode, within)


def _up_to(values: Iterable[int], maximum: int) -> list[int]:
    """Return the values that do not exceed the maximum, and the maximum itself at the end."""
    kept = [value for value in values if value < maximum]
    return [*kept, maximum]


def _at_least_to(values: list[int], maximum: int) -> list[int]:
    """Return the values, and the maximum at the end if none reaches it."""
    return values if values and values[-1] >= maximum else [*values, maximum]


def _end(maximum: int | None, limit: int) -> int:
    return limit if maximum is None else min(maximum, limit)


def _check_count(phase: str, axes: Sequence[Sequence[int]]) -> None:
    count = math.prod(len(values) for values in axes)
    if count > _MAX_BUCKETS:
        raise ValueError(
            f"the {phase} axes make {count} buckets, more than {_MAX_BUCKETS}: choose bucketing_strategy "
            f"exponential, or raise step of the {OPTION_PREFIX}{phase} options"
        )


def _shape(bucket: Bucket) -> str:
    return f"({bucket.batch}, {bucket.query}, {bucket.context_blocks})"
