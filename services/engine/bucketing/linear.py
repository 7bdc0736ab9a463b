"""The strategy `linear`: powers of two up to a step, then every step."""

from __future__ import annotations

from dataclasses import dataclass

from services.engine.bucketing.axes import PaddingOptions
from services.engine.bucketing.bucket import BucketLimits
from services.engine.bucketing.strategy import BucketRanges, BucketStrategy, SteppedRange, register


@dataclass(frozen=True, slots=True)
class LinearRange(SteppedRange):
    """minimum * 2**k below the step, then multiples of the step. A maximum off the steps is not listed.

    A minimum of 0 lists 0 in addition to what a minimum of one step would give.
    """

    def __post_init__(self) -> None:
        if self.step < 1 or not 0 <= self.minimum <= self.maximum:
            raise ValueError(
                f"linear buckets need 0 <= min <= max and step >= 1, not min {self.minimum}, "
                f"step {self.step}, max {self.maximum}"
            )

    def values(self) -> list[int]:
        """Return the values, rising."""
        if self.minimum == 0:
            return [0] if self.maximum == 0 else [0, *_ramp_and_steps(self.step, self.step, self.maximum)]
        return _ramp_and_steps(self.minimum, self.step, self.maximum)


def _ramp_and_steps(minimum: int, step: int, maximum: int) -> list[int]:
    ramp, value = [], minimum
    while value < step and value <= maximum:
        ramp.append(value)
        value *= 2
    return ramp + [value for value in range(step, maximum + 1, step) if value >= minimum]


@register("linear", vllm_name="lin")
class Linear(BucketStrategy):
    """Every step of each axis."""

    summary = "powers of two up to a step, then every step: little padding, very many buckets"
    settings = "`min`, `step` and `max`"

    @classmethod
    def takes(cls, axis: str, setting: str, value: int) -> bool:
        """Return whether the setting is none of padding."""
        return not setting.startswith("pad_")

    @classmethod
    def ranges(cls, limits: BucketLimits, padding: PaddingOptions) -> BucketRanges:
        """Return the range of each axis for an engine with these limits."""
        block = limits.block_size
        first_query = min(block, limits.max_num_batched_tokens)
        decode_blocks = max(limits.max_model_len * limits.max_num_seqs // block, block)
        return BucketRanges(
            prefill_batch=LinearRange(1, 1, limits.max_prefill_seqs),
            prefill_query=LinearRange(first_query, block, limits.max_num_batched_tokens),
            prefill_context=LinearRange(0, 1, max(0, (limits.max_model_len - first_query) // block)),
            decode_batch=LinearRange(1, 32, limits.max_num_seqs),
            decode_blocks=LinearRange(1, block, limits.num_blocks if limits.contiguous else decode_blocks),
        )
