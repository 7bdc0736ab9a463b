"""The static shapes of embedding forwards, and how documents are put into them. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

_SHORTEST = 16


@dataclass(frozen=True, slots=True)
class EmbedBatch:
    """Documents, by their place in the caller's list, that one forward of `rows` x `length` tokens takes."""

    rows: int
    length: int
    documents: tuple[int, ...]


class EmbedShapes:
    """Shapes (rows, length): lengths and rows are powers of two, and what a forward may hold is limited.

    `max_tokens` limits rows * length; a single document of the maximum length is always let through.
    """

    def __init__(self, max_length: int, max_tokens: int) -> None:
        powers = (1 << exponent for exponent in range(max_length.bit_length()))
        self.lengths = (*(power for power in powers if _SHORTEST <= power < max_length), max_length)
        self._max_tokens = max_tokens

    def all(self) -> tuple[tuple[int, int], ...]:
        """Every shape that `plan` may use."""
        return tuple(
            (1 << exponent, length)
            for length in self.lengths
            for exponent in range(self.most_rows(length).bit_length())
        )

    @property
    def most_tokens(self) -> int:
        """Rows times length of the largest shape."""
        return max(rows * length for rows, length in self.all())

    def bucket(self, length: int) -> int:
        """The length of the shapes that take a document of `length` tokens, 1 to the maximum."""
        return self.lengths[bisect_left(self.lengths, length)]

    def plan(self, lengths: Sequence[int]) -> list[EmbedBatch]:
        """Groups documents of like length. Lengths are between 1 and the maximum."""
        members: dict[int, list[int]] = {}
        for document, length in enumerate(lengths):
            members.setdefault(self.bucket(length), []).append(document)
        batches: list[EmbedBatch] = []
        for length, documents in sorted(members.items()):
            most = self.most_rows(length)
            for first in range(0, len(documents), most):
                part = tuple(documents[first : first + most])
                batches.append(EmbedBatch(self.rows_for(len(part)), length, part))
        return batches

    @staticmethod
    def rows_for(count: int) -> int:
        """The least power of two that is not below `count`."""
        return 1 << (count - 1).bit_length()

    def most_rows(self, length: int) -> int:
        """The largest power of two of rows that the limit allows."""
        return 1 << (max(1, self._max_tokens // length).bit_length() - 1)
