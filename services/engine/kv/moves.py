"""Copies of blocks, and when defragmentation pays: for a cache whose blocks are fetched as one slice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# A step reads the slice up to the highest used block, holes included; its bucket pads that anyway.
_TOLERATED_SHARE: Final = 8


@dataclass(frozen=True, slots=True)
class BlockMove:
    """Copy a block from `source` to `target`, whose contents nobody needs.

    `tokens`: how many of its tokens; the other slots of the target become zero. None: all of them.
    """

    source: int
    target: int
    tokens: int | None = None


def worth_moving(highest_used: int, used: int) -> bool:
    """True if more than an eighth of the slice up to the highest used block is holes.

    A move costs one read and one write of a block, once; a hole costs one read in every step until it is
    filled. Filling each of the last few at once would move blocks of nearly every sequence that ends.
    """
    length = highest_used + 1
    return (length - used) * _TOLERATED_SHARE > length
