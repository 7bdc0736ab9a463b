"""Padding-aware buckets: the fewest multiples of a step that keep every padding under a share and a cap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from services.engine.bucketing.limits import BucketLimits
from services.engine.bucketing.ranges import BucketRanges, fit_to_pool

_MAX_RATIO: Final = 0.5


@dataclass(frozen=True, slots=True)
class PaddingRange:
    """Powers of two up to the step, then those of its multiples that padding cannot do without.

    A multiple is listed if the next one would pad the value after the last listed one by more than `ratio` of
    itself, or by more than `cap`, or if it divides by the cap. A cap of 0 is the maximum. A ratio of 0 gives
    linear buckets, 0.5 about the powers of two.
    """

    minimum: int
    step: int
    maximum: int
    cap: int
    ratio: float

    def __post_init__(self) -> None:
        if self.step < 1 or not 0 <= self.minimum <= self.maximum or self.cap < 0:
            raise ValueError(
                f"padding buckets need 0 <= min <= max, step >= 1 and cap >= 0, not min {self.minimum}, "
                f"step {self.step}, max {self.maximum}, cap {self.cap}"
            )
        if not 0 <= self.ratio <= _MAX_RATIO:
            raise ValueError(f"the padding ratio must be between 0 and {_MAX_RATIO}, not {self.ratio}")

    def values(self) -> list[int]:
        """The values, rising. The maximum is always among them."""
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


@dataclass(frozen=True, slots=True)
class PaddingOptions:
    """What an operator may choose about the `padding` strategy.

    `ratio` bounds the padding's share of a bucket, between 0 and 0.5. The caps bound it absolutely, in rows,
    tokens of a row, context blocks of a row and blocks of a decode batch; None is the default: a quarter of
    the maximum, for context blocks those of a full step.
    """

    ratio: float = 0.25
    max_rows: int | None = None
    max_tokens: int | None = None
    max_context: int | None = None
    max_blocks: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= _MAX_RATIO:
            raise ValueError(f"the padding ratio must be between 0 and {_MAX_RATIO}, not {self.ratio}")
        for name in ("max_rows", "max_tokens", "max_context", "max_blocks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"the padding cap {name} must be at least 1, not {value}")


def padding_ranges(limits: BucketLimits, options: PaddingOptions | None = None) -> BucketRanges:
    """The ranges of the `padding` strategy."""
    chosen = options or PaddingOptions()
    block, tokens = limits.block_size, limits.max_num_batched_tokens
    first_query = min(block, tokens)
    context = max(0, -(-(limits.max_model_len - first_query) // block))
    blocks = max(-(-limits.max_model_len * limits.max_num_seqs // block), block)
    first_block = block
    if limits.contiguous:
        first_block, blocks = fit_to_pool(block, block, limits.num_blocks, pool=limits.num_blocks)

    def axis(minimum: int, step: int, maximum: int, cap: int | None, default: int) -> PaddingRange:
        return PaddingRange(minimum, step, maximum, default if cap is None else cap, chosen.ratio)

    def rows(step: int, maximum: int) -> PaddingRange:
        return axis(1, step, maximum, chosen.max_rows, -(-maximum // 4))

    return BucketRanges(
        prefill_batch=rows(1, limits.max_prefill_seqs),
        prefill_query=axis(first_query, block, tokens, chosen.max_tokens, -(-tokens // 4)),
        prefill_context=axis(0, 2, context, chosen.max_context, -(-tokens // block)),
        decode_batch=rows(2, limits.max_num_seqs),
        decode_blocks=axis(first_block, block, blocks, chosen.max_blocks, -(-blocks // 4)),
    )
