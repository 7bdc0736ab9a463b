"""Axes of buckets: a strategy describes each axis by a range, and a range lists its values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


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
