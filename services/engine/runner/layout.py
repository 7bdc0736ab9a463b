"""Where blocks lie in the caches, and how many rows and ids the runner's shapes have."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The flat caches: `num_blocks` blocks of the pool, then the padding block.

    `contiguous`: a decode reads the caches' first blocks as one slice, whoever owns them.
    """

    block_size: int
    num_blocks: int
    contiguous: bool = False

    @property
    def padding_block(self) -> int:
        """Id of the block that takes the writes of padding."""
        return self.num_blocks

    @property
    def padding_start(self) -> int:
        """First slot of the padding block: slots from here on belong to nobody."""
        return self.num_blocks * self.block_size


def static_counts(largest: int) -> tuple[int, ...]:
    """The counts that shapes may have: the powers of two below `largest`, and `largest`."""
    powers = (1 << exponent for exponent in range(largest.bit_length()))
    return (*(power for power in powers if power < largest), largest)


def padded_count(count: int, counts: tuple[int, ...]) -> int:
    """The smallest of the rising `counts` that holds `count`. Raises ValueError if none does."""
    index = bisect_left(counts, count)
    if index == len(counts):
        raise ValueError(f"a step has {count} rows and its shapes hold {counts[-1]}")
    return counts[index]
