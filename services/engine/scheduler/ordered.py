"""A sorted list of sequences."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import islice

from services.engine.scheduler.sequence import Sequence


class OrderedSequences:
    """Sequences by a unique key, which must not change while they are in.

    Made for a few thousand: an insertion moves pointers in memory, which is faster there than any tree.
    """

    def __init__(self, key: Callable[[Sequence], tuple[int, int]]) -> None:
        self._key = key
        self._sorted: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sorted)

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._sorted)

    def add(self, sequence: Sequence) -> None:
        """Puts a sequence in its place."""
        insort(self._sorted, sequence, key=self._key)

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence that is in."""
        del self._sorted[bisect_left(self._sorted, self._key(sequence), key=self._key)]

    def first(self, count: int) -> list[Sequence]:
        """Up to `count` sequences with the lowest keys, rising."""
        return list(islice(self._sorted, count))

    def last(self) -> Sequence | None:
        """The sequence with the highest key."""
        return self._sorted[-1] if self._sorted else None
