"""An operator's settings of axes, applied to an engine's limits and to a strategy's ranges."""

from __future__ import annotations

import sys
from dataclasses import replace

from services.engine.bucketing.axes import AXES, OPTION_PREFIX, AxisOptions, BucketAxes
from services.engine.bucketing.exponential import ExponentialRange
from services.engine.bucketing.limits import BucketLimits
from services.engine.bucketing.linear import LinearRange
from services.engine.bucketing.padding import PaddingRange
from services.engine.bucketing.ranges import AxisRange, BucketRanges, fit_to_pool

_MAX_VALUES = 100_000


def narrow_limits(limits: BucketLimits, axes: BucketAxes) -> BucketLimits:
    """The limits with the operator's bounds on prefill rows and on the length of a chunk."""
    rows = axes.prefill_batch.max
    return replace(
        limits,
        max_prefill_seqs=limits.max_prefill_seqs if rows is None else min(rows, limits.max_prefill_seqs),
        max_chunk=axes.prefill_query.max,
    )


def with_axes(ranges: BucketRanges, axes: BucketAxes, limits: BucketLimits) -> BucketRanges:
    """The ranges with the operator's settings in place of the strategy's.

    A maximum beyond what an engine can use ends there. Raises ValueError for a minimum that lies beyond it.
    """
    return BucketRanges(
        **{axis: _set(axis, getattr(ranges, axis), getattr(axes, axis), limits) for axis in AXES}
    )


def beyond_limits(axes: BucketAxes, limits: BucketLimits) -> list[str]:
    """One line for each maximum beyond what an engine with these limits can use."""
    lines = []
    for axis in AXES:
        maximum = getattr(axes, axis).max
        most, reason = most_of(axis, limits)
        if maximum is not None and maximum > most:
            lines.append(f"{OPTION_PREFIX}{axis} ends at {most} and not at its max {maximum}: {reason}")
    return lines


def most_of(axis: str, limits: BucketLimits) -> tuple[int, str]:
    """The largest value of an axis that an engine can use, and why."""
    match axis:
        case "prefill_batch":
            return limits.max_prefill_seqs, "no more prompts are computed together (max_prefill_batch)"
        case "prefill_query":
            most = min(limits.max_num_batched_tokens, limits.max_model_len)
            return most, "no chunk is longer (max_idle_batched_tokens, max_num_batched_tokens, max_model_len)"
        case "prefill_context":
            return limits.max_context_blocks, "a sequence has no more blocks (max_model_len, block_size)"
        case "decode_batch":
            return limits.max_num_seqs, "no more sequences run at once (max_num_seqs)"
        case _ if limits.contiguous:
            return limits.num_blocks, "the KV pool has no more blocks"
        case _:
            # Each batch's blocks end at what its rows can have, which the grid sees to.
            return sys.maxsize, "no batch has more blocks"


def _set(axis: str, chosen: AxisRange, options: AxisOptions, limits: BucketLimits) -> AxisRange:
    if not options.given or isinstance(chosen, ExponentialRange):
        return _set_first(chosen, options)
    if not isinstance(chosen, LinearRange | PaddingRange):
        raise TypeError(f"no settings are known for {type(chosen).__name__}")
    most, reason = most_of(axis, limits)
    minimum = chosen.minimum if options.min is None else options.min
    step = chosen.step if options.step is None else options.step
    maximum = chosen.maximum if options.max is None else min(options.max, most)
    if axis == "decode_blocks" and limits.contiguous:
        minimum, maximum = fit_to_pool(minimum, step, maximum, pool=limits.num_blocks)
    if options.min is None:
        minimum = min(minimum, maximum)
    elif options.max is None and minimum > maximum:
        # Some strategies end an axis before the last value that can be needed.
        maximum = min(minimum, most)
    if minimum > maximum:
        raise ValueError(f"{OPTION_PREFIX}{axis}: min {minimum} exceeds {maximum}: {reason}; lower min")
    if maximum // step > _MAX_VALUES:
        raise ValueError(
            f"{OPTION_PREFIX}{axis}: step {step} makes more than {_MAX_VALUES} values up to {maximum}: raise "
            "step"
        )
    if isinstance(chosen, LinearRange):
        return LinearRange(minimum, step, maximum)
    cap = chosen.cap
    if axis == "decode_blocks" and limits.contiguous:
        cap = min(cap, -(-maximum // 4))
    return PaddingRange(
        minimum,
        step,
        maximum,
        cap=cap if options.pad_max is None else options.pad_max,
        ratio=chosen.ratio if options.pad_percent is None else options.pad_percent / 100,
    )


def _set_first(chosen: AxisRange, options: AxisOptions) -> AxisRange:
    """An exponential axis: its first value is the one setting that its limits do not carry already."""
    if options.min is None or not isinstance(chosen, ExponentialRange):
        return chosen
    return replace(chosen, minimum=options.min)
