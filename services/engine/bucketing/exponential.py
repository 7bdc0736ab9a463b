"""Exponential buckets: a given number of values, evenly spaced on a logarithmic axis, rounded up to steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from services.engine.bucketing.limits import LONG_CONTEXT, BucketLimits
from services.engine.bucketing.ranges import BucketRanges, bits

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
