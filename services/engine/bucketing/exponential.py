"""The strategy `exponential`: about as many values on each axis as its maximum has bits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Self

from services.engine.bucketing.axes import AxisOptions, PaddingOptions
from services.engine.bucketing.bucket import LONG_CONTEXT, BucketLimits
from services.engine.bucketing.strategy import BucketRanges, BucketStrategy, register


def bits(value: int) -> int:
    """Return ceil(log2(value)) of a positive int, exactly."""
    return (value - 1).bit_length()


# Sequences that share a prefix count its blocks once each, so a batch's sum of blocks can exceed the pool.
_SHARING_FACTOR: Final = 3


@dataclass(frozen=True, slots=True)
class ExponentialRange:
    """minimum * (maximum / minimum)**(1 / (limit - 1) * i) for i < limit, rounded up to steps, each once.

    A minimum of 0 or 1 is listed in addition to the values of a minimum of one step. A limit of 1 lists the
    maximum alone. `ends_exactly`: the last value is the maximum and not its rounding.

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
        """Return the values, rising."""
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

    def adjusted(self, axis: str, options: AxisOptions, limits: BucketLimits) -> Self:
        """Return the range with another first value: the limits carry the other settings already."""
        return self if options.min is None else replace(self, minimum=options.min)


@register("exponential", vllm_name="exp")
class Exponential(BucketStrategy):
    """As many values as the maximum has bits; the limits of the engine space them."""

    summary = "about as many values on each axis as its maximum has bits"
    settings = (
        "`max` of `--bucket-prefill-batch` and `min=1` of `--bucket-prefill-query` (the engine's limits "
        "space the rest)"
    )

    @classmethod
    def takes(cls, axis: str, setting: str, value: int) -> bool:
        """Return whether the setting is a bound on prefill rows or a first prompt length of one token.

        Engines that go on where others have computed the prompt need that length.
        """
        return (axis, setting) == ("prefill_batch", "max") or (axis, setting, value) == (
            "prefill_query",
            "min",
            1,
        )

    @classmethod
    def refusal(cls, axis: str, setting: str) -> str:
        """Return why a setting is not taken, one line that follows the option's name."""
        return (
            ": bucketing_strategy exponential spaces its buckets by itself and takes min=1 of "
            f"bucket_prefill_query and max of bucket_prefill_batch, not {setting}: leave it out, or choose "
            "linear or padding"
        )

    @classmethod
    def ranges(cls, limits: BucketLimits, padding: PaddingOptions) -> BucketRanges:
        """Return the range of each axis for an engine with these limits."""
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
