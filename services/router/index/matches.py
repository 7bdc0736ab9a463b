"""The result of a look-up: which engine holds how much of a chain of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

# Up to so many engines are taken out of a set one by one; more are unpacked at once.
_FEW = 8


class Matches:
    """Engines by the number of blocks that they hold from a chain's start on.

    `steps`: sets of engines with their common number of blocks, which rises; an engine is in one of them at
    the most. A set is an integer with a bit for the slot of each engine, of which there are `slots`.
    """

    __slots__ = ("_slots", "_steps")

    def __init__(self, steps: Sequence[tuple[int, int]], slots: int) -> None:
        self._steps = steps
        self._slots = slots

    def __bool__(self) -> bool:
        return bool(self._steps)

    def blocks(self, slot: int) -> int:
        """Blocks of one slot; -1 stands for holding nothing."""
        if slot >= 0:
            for engines, blocks in self._steps:
                if engines >> slot & 1:
                    return blocks
        return 0

    def by_slot(self) -> npt.NDArray[np.int64]:
        """Blocks by slot: int64, a number for each slot, and a last 0: slot -1 stands for holding nothing."""
        column = np.zeros(self._slots + 1, dtype=np.int64)
        for engines, blocks in self._steps:
            if engines.bit_count() <= _FEW:
                for slot in _few_slots(engines):
                    column[slot] = blocks
            else:
                column[:-1][_bits(engines, self._slots)] = blocks
        return column


def _few_slots(engines: int) -> Iterator[int]:
    while engines:
        lowest = engines & -engines
        yield lowest.bit_length() - 1
        engines ^= lowest


def _bits(engines: int, slots: int) -> npt.NDArray[np.bool_]:
    packed = np.frombuffer(engines.to_bytes((slots + 7) // 8, "little"), dtype=np.uint8)
    return np.unpackbits(packed, count=slots, bitorder="little").view(np.bool_)
