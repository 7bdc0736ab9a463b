"""The strategy `padding`: as few values as keep the padding of each within bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from services.engine.bucketing.axes import MAX_PADDING_RATIO, AxisOptions, PaddingOptions
from services.engine.bucketing.bucket import BucketLimits
from services.engine.bucketing.strategy import (
    BucketRanges,
    BucketStrategy,
    SteppedRange,
    fit_to_pool,
    register,
)


@dataclass(frozen=True, slots=True)
class PaddingRange(SteppedRange):
    """Powers of two up to the step, then those of its multiples that padding cannot do without.

    A multiple is listed if the next one would pad the value after the last listed one by more than `ratio` of
    itself, or by more than `cap`, or if it divides by the cap. A cap of 0 is the maximum. A ratio of 0 gives
    linear buckets, 0.5 about the powers of two.
    """

    cap: int
    ratio: float

    def __post_init__(self) -> None:
        if self.step < 1 or not 0 <= self.minimum <= self.maximum or self.cap < 0:
            raise ValueError(
                f"padding buckets need 0 <= min <= max, step >= 1 and cap >= 0, not min {self.minimum}, "
                f"step {self.step}, max {self.maximum}, cap {self.cap}"
            )
        if not 0 <= self.ratio <= MAX_PADDING_RATIO:
            raise ValueError(f"the padding ratio must be between 0 and {MAX_PADDING_RATIO}, not {self.ratio}")

    def values(self) -> list[int]:
        """Return the values, rising. The maximum is always among them."""
        cap = self.cap or self.maximum
        found, value = [self.minimum], self.minimum
        while value <= self.maximum:
            last = found[-1]
            if value <= self.step:
                following = max(1, 2 * last)
                if following <= self.maximum:
                    found.append(following)
            else:
                following = value + self.step
                padding = following - last - 1
                wasteful = padding / following > self.ratio or padding > cap or value % cap == 0
                if wasteful and value != last:
                    found.append(value)
            value = following
        return found if found[-1] == self.maximum else [*found, self.maximum]

    def adjusted(self, axis: str, options: AxisOptions, limits: BucketLimits) -> Self:
        """Return the range with the operator's bounds, step, cap and ratio."""
        if not options.given:
            return self
        found = SteppedRange.adjusted(self, axis, options, limits)
        cap = found.cap
        if axis == "decode_blocks" and limits.contiguous:
            cap = min(cap, -(-found.maximum // 4))
        return replace(
            found,
            cap=cap if options.pad_max is None else options.pad_max,
            ratio=found.ratio if options.pad_percent is None else options.pad_percent / 100,
        )


@register("padding", vllm_name="pad")
class Padding(BucketStrategy):
    """As few values as bounds on padding allow."""

    summary = (
        "as few steps as keep the padding of each value under a share (`--bucketing-pad-ratio`) and a cap "
        "(`--bucketing-pad-max-rows`, `-tokens`, `-context`, `-blocks`)"
    )
    settings = (
        "`min`, `step`, `max`, `pad_max` and `pad_percent` (most padding, in units of the axis and in "
        "percent up to 50, in place of the `--bucketing-pad` options)"
    )
    padded = True

    @classmethod
    def takes(cls, axis: str, setting: str, value: int) -> bool:
        """Return True: every setting of every axis has a meaning."""
        return True

    @classmethod
    def ranges(cls, limits: BucketLimits, padding: PaddingOptions) -> BucketRanges:
        """Return the range of each axis for an engine with these limits."""
        block, tokens = limits.block_size, limits.max_num_batched_tokens
        first_query = min(block, tokens)
        context = max(0, -(-(limits.max_model_len - first_query) // block))
        blocks = max(-(-limits.max_model_len * limits.max_num_seqs // block), block)
        first_block = block
        if limits.contiguous:
            first_block, blocks = fit_to_pool(block, block, limits.num_blocks, pool=limits.num_blocks)

        def axis(minimum: int, step: int, maximum: int, cap: int | None, default: int) -> PaddingRange:
            return PaddingRange(minimum, step, maximum, default if cap is None else cap, padding.ratio)

        def rows(step: int, maximum: int) -> PaddingRange:
            return axis(1, step, maximum, padding.max_rows, -(-maximum // 4))

        return BucketRanges(
            prefill_batch=rows(1, limits.max_prefill_seqs),
            prefill_query=axis(first_query, block, tokens, padding.max_tokens, -(-tokens // 4)),
            prefill_context=axis(0, 2, context, padding.max_context, -(-tokens // block)),
            decode_batch=rows(2, limits.max_num_seqs),
            decode_blocks=axis(first_block, block, blocks, padding.max_blocks, -(-blocks // 4)),
        )
