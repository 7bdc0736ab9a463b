"""What a prefix cache holds, told to whoever wants to follow it: a router that seeks the longest hit."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Stored:
    """A block can be hit, by whoever hits all before it: its hash names those too."""

    sequence_number: int
    block_hash: bytes


@dataclass(frozen=True, slots=True)
class Removed:
    """A block cannot be hit any more."""

    sequence_number: int
    block_hash: bytes


@dataclass(frozen=True, slots=True)
class Cleared:
    """No block can be hit any more."""

    sequence_number: int


KvEvent: TypeAlias = Stored | Removed | Cleared


class KvEventLog:
    """The latest events, numbered 1, 2, 3, ... without a gap, for one consumer.

    At most `capacity` events wait to be drained; then the oldest are dropped. The consumer sees that as a gap
    in the numbers: it takes all `names` and goes on with the events that are newer than `number`.
    """

    def __init__(self, capacity: int, contents: Collection[bytes]) -> None:
        """`contents` is a live view of the hashes that are cached, in any order."""
        if capacity < 1:
            raise ValueError(f"an event log holds at least one event, not {capacity}")
        self._waiting: deque[KvEvent] = deque(maxlen=capacity)
        self._contents = contents
        self._number = 0

    def stored(self, block_hash: bytes) -> None:
        """Logs that a block became hittable."""
        self._number += 1
        self._waiting.append(Stored(self._number, block_hash))

    def removed(self, block_hash: bytes) -> None:
        """Logs that a block was given up."""
        self._number += 1
        self._waiting.append(Removed(self._number, block_hash))

    def cleared(self) -> None:
        """Logs that all blocks were given up."""
        self._number += 1
        self._waiting.append(Cleared(self._number))

    def __len__(self) -> int:
        """Events that wait to be drained."""
        return len(self._waiting)

    @property
    def number(self) -> int:
        """The number of the latest event, drained or not."""
        return self._number

    def drain(self) -> list[KvEvent]:
        """Takes the waiting events, oldest first."""
        events = list(self._waiting)
        self._waiting.clear()
        return events

    def names(self) -> list[bytes]:
        """All that can be hit as of the latest event, drained or not, in any order."""
        return list(self._contents)
