"""In which order buckets are captured. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from services.engine.bucketing import Bucket
from services.engine.graphs.phase import Key, Phase, size_of


class CaptureOrder(Enum):
    """MIN_TOKENS: least tokens first, so that a budget holds many graphs. MAX_BS: largest batch first, the
    one that is worth most. LARGEST_FIRST: what runs out of memory does so at once.
    """

    MIN_TOKENS = "min_tokens"
    MAX_BS = "max_bs"
    LARGEST_FIRST = "largest_first"


@dataclass(frozen=True, slots=True)
class Shape:
    """One static shape to capture; `size` is its padded tokens."""

    phase: Phase
    key: Key
    size: int


def shapes_in_order(
    phase: Phase, buckets: Iterable[Bucket], order: CaptureOrder, block_size: int
) -> list[Shape]:
    """The buckets of a phase as shapes, in the order of capture."""

    def tokens(bucket: Bucket) -> int:
        return size_of(phase, bucket, block_size)

    def length(bucket: Bucket) -> int:
        """Of a prefill row; of all of a decode's context."""
        return bucket.query + bucket.context_blocks * block_size

    keys: dict[CaptureOrder, Callable[[Bucket], tuple[int, ...]]] = {
        CaptureOrder.MIN_TOKENS: lambda bucket: (tokens(bucket), length(bucket), bucket.batch),
        CaptureOrder.MAX_BS: lambda bucket: (-bucket.batch, length(bucket)),
        CaptureOrder.LARGEST_FIRST: lambda bucket: (-tokens(bucket), -bucket.batch),
    }
    return [Shape(phase, bucket, tokens(bucket)) for bucket in sorted(buckets, key=keys[order])]


def count_shapes(phase: Phase, counts: Iterable[int]) -> list[Shape]:
    """Shapes that are numbers of rows or blocks, fewest first."""
    return [Shape(phase, count, count) for count in sorted(counts)]


def split_long(shapes: Sequence[Shape], max_tokens: int) -> tuple[list[Shape], list[Shape]]:
    """Prefills that are captured, and those above the limit, which are bound by computation anyway.

    What counts is the tokens of the chunk's rows and of one row's context: batch * query + context.
    """
    kept: list[Shape] = []
    long: list[Shape] = []
    for shape in shapes:
        bucket = shape.key
        if not isinstance(bucket, Bucket):
            raise TypeError(f"{shape} is no prefill")
        context = shape.size // bucket.batch - bucket.query
        (kept if bucket.batch * bucket.query + context <= max_tokens else long).append(shape)
    return kept, long
