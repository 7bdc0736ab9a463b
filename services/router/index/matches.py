"""The result of a look-up: which engine holds how much of a chain of blocks."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

K = TypeVar("K", bound=Hashable)

# Up to so many engines are taken out of a set one by one; more are unpacked at once.
_FEW = 8


class Matches(Generic[K]):
    """Engines by the number of blocks that they hold from a chain's start on.

    `steps`: sets of engines with their common number of blocks, which rises; an engine is in one of them at
    the most. A set is an integer with a bit for the slot of each engine; `engines` names them by slot.
    """

    __slots__ = ("_engines", "_steps")

    def __init__(self, steps: Sequence[tuple[int, int]], engines: Sequence[K | None]) -> None:
        self._steps = steps
        self._engines = engines

    def __bool__(self) -> bool:
        return bool(self._steps)

    @property
    def longest(self) -> int:
        """Blocks that the best engine holds."""
        return self._steps[-1][1] if self._steps else 0

    def by_engine(self) -> dict[K, int]:
        """Blocks of each engine that holds at least the first one."""
        found: dict[K, int] = {}
        for engines, blocks in self._steps:
            for slot in _slots(engines, len(self._engines)):
                engine = self._engines[slot]
                if engine is not None:
                    found[engine] = blocks
        return found

    def by_slot(self) -> npt.NDArray[np.int64]:
        """Blocks by slot: int64, a number for each slot, and a last 0: slot -1 stands for holding nothing."""
        column = np.zeros(len(self._engines) + 1, dtype=np.int64)
        for engines, blocks in self._steps:
            if engines.bit_count() <= _FEW:
                for slot in _few_slots(engines):
                    column[slot] = blocks
            else:
                column[:-1][_bits(engines, len(self._engines))] = blocks
        return column


def _slots(engines: int, slots: int) -> Iterator[int]:
    if engines.bit_count() <= _FEW:
        return _few_slots(engines)
    return iter(np.flatnonzero(_bits(engines, slots)).tolist())


def _few_slots(engines: int) -> Iterator[int]:
    while engines:
        lowest = engines & -engines
        yield lowest.bit_length() - 1
        engines ^= lowest


def _bits(engines: int, slots: int) -> npt.NDArray[np.bool_]:
    packed = np.frombuffer(engines.to_bytes((slots + 7) // 8, "little"), dtype=np.uint8)
    return np.unpackbits(packed, count=slots, bitorder="little").view(np.bool_)
