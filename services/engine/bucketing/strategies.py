"""The strategies of buckets: which values an axis has, linear, exponential or by a bound on padding."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from services.engine.bucketing.bucket import LONG_CONTEXT, BucketLimits


class AxisRange(Protocol):
    """One axis as a strategy generates it."""

    @property
    def maximum(self) -> int:
        """The value that the axis is meant to reach."""

    def values(self) -> list[int]:
        """The values, rising. The maximum may be missing: some rules drop it."""


@dataclass(frozen=True, slots=True)
class BucketRanges:
    """A strategy's axes: rows, tokens and context blocks per row; rows and blocks of a decode batch."""

    prefill_batch: AxisRange
    prefill_query: AxisRange
    prefill_context: AxisRange
    decode_batch: AxisRange
    decode_blocks: AxisRange


def bits(value: int) -> int:
    """ceil(log2(value)) of a positive int, exactly."""
    return (value - 1).bit_length()


def up_to(values: Iterable[int], maximum: int) -> list[int]:
    """The values that do not exceed the maximum, and the maximum itself at the end."""
    kept = [value for value in values if value < maximum]
    return [*kept, maximum]


def at_least_to(values: list[int], maximum: int) -> list[int]:
    """The values, and the maximum at the end if none reaches it."""
    return values if values and values[-1] >= maximum else [*values, maximum]


def fit_to_pool(minimum: int, step: int, maximum: int, *, pool: int) -> tuple[int, int]:
    """Minimum and maximum of decode blocks whose fetch is contiguous: none lies outside the pool."""
    maximum = min(maximum, pool)
    return (minimum if minimum <= maximum else max(1, maximum - step)), maximum


# Sequences that share a prefix count its blocks once each, so a batch's sum of blocks can exceed the pool.
_SHARING_FACTOR: Final = 3


@dataclass(frozen=True, slots=True)
class ExponentialRange:
    """minimum * (maximum / minimum)**(1 / (limit - 1) * i) for i < limit, rounded up to steps, each once.

    A minimum of 0 or 1 is listed beside what a minimum of one step would give. A limit of 1 lists the maximum
    alone. `ends_exactly`: the last value is the maximum and not its rounding.

    The exponent is computed in this order, as the vendor's server does: where a power is exact its last bit
    decides whether a value takes one step more, and lists of both servers are compared.
    """

    minimum: int
    step: int
    maximum: int
    limit: int
    ends_exactly: bool = False

    def __post_init__(self) -> None:
        if self.step < 1 or self.minimum < 0 or self.maximum < 1 or self.limit < 1:
            raise ValueError(
                f"exponential buckets need min >= 0 and step, max and limit >= 1, not min {self.minimum}, "
                f"step {self.step}, max {self.maximum}, limit {self.limit}"
            )

    def values(self) -> list[int]:
        """The values, rising."""
        if self.limit == 1:
            return [self.maximum]
        first = self.step if self.minimum <= 1 else self.minimum
        found = {self.minimum} if self.minimum <= 1 else set()
        for i in range(self.limit):
            if self.ends_exactly and i == self.limit - 1:
                found.add(self.maximum)
                continue
            value = first * (self.maximum / first) ** (1 / (self.limit - 1) * i)
            found.add(math.ceil(value / self.step) * self.step)
        # Rounding up can pass the maximum, and so does a first step that is larger than it.
        return sorted({min(value, self.maximum) for value in found})


def exponential_ranges(limits: BucketLimits) -> BucketRanges:
    """The default ranges of the `exponential` strategy."""
    block, tokens = limits.block_size, limits.max_num_batched_tokens
    first_query = min(block, tokens)
    before = tokens if limits.max_model_len >= LONG_CONTEXT else first_query
    context = max(1, (limits.max_model_len - before) // block)
    worst = limits.blocks_per_sequence * limits.max_num_seqs
    pool = limits.num_blocks if limits.contiguous else _SHARING_FACTOR * limits.num_blocks
    blocks = min(worst, pool) if limits.contiguous or limits.clamp_decode_blocks else worst
    return BucketRanges(
        prefill_batch=ExponentialRange(1, 2, limits.max_prefill_seqs, bits(limits.max_prefill_seqs) + 1),
        prefill_query=ExponentialRange(first_query, block, tokens, max(1, bits(tokens))),
        prefill_context=ExponentialRange(0, 1, context, 2 if context == 1 else bits(context) + 1),
        decode_batch=ExponentialRange(1, 2, limits.max_num_seqs, bits(limits.max_num_seqs) + 1),
        decode_blocks=ExponentialRange(
            1, limits.max_num_seqs, blocks, bits(blocks) + 1, ends_exactly=limits.contiguous
        ),
    )


@dataclass(frozen=True, slots=True)
class LinearRange:
    """minimum * 2**k below the step, then multiples of the step. A maximum off the steps is not listed.

    A minimum of 0 lists 0 beside what a minimum of one step would give.
    """

    minimum: int
    step: int
    maximum: int

    def __post_init__(self) -> None:
        if self.step < 1 or not 0 <= self.minimum <= self.maximum:
            raise ValueError(
                f"linear buckets need 0 <= min <= max and step >= 1, not min {self.minimum}, "
                f"step {self.step}, max {self.maximum}"
            )

    def values(self) -> list[int]:
        """The values, rising."""
        if self.minimum == 0:
            return [0] if self.maximum == 0 else [0, *_ramp_and_steps(self.step, self.step, self.maximum)]
        return _ramp_and_steps(self.minimum, self.step, self.maximum)


def _ramp_and_steps(minimum: int, step: int, maximum: int) -> list[int]:
    ramp, value = [], minimum
    while value < step and value <= maximum:
        ramp.append(value)
        value *= 2
    return ramp + [value for value in range(step, maximum + 1, step) if value >= minimum]


def linear_ranges(limits: BucketLimits) -> BucketRanges:
    """The default ranges of the `linear` strategy."""
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
