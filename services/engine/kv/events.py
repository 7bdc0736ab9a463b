"""What a prefix cache holds, told to whoever wants to follow it: a router that seeks the longest hit."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Stored:
    """A block can be hit: `token_ids`, `block_size` of them, after the block named `parent`.

    `parent` is None for a sequence's first block. It may name a block that is not cached (any more): then
    nobody reaches this one until the parent is stored again.
    """

    sequence_number: int
    block_hash: bytes
    parent: bytes | None
    token_ids: tuple[int, ...]
    block_size: int


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


@dataclass(frozen=True, slots=True)
class KvSnapshot:
    """All that can be hit after the event `sequence_number` (0: before the first), parents before children.

    The blocks carry the numbers of the events that stored them.
    """

    sequence_number: int
    blocks: tuple[Stored, ...]


class KvEventLog:
    """The latest events, numbered 1, 2, 3, ... without a gap, for one consumer.

    At most `capacity` events wait to be drained; then the oldest are dropped. The consumer sees that as a gap
    in the numbers: it takes a snapshot and goes on with the events that are newer than it.
    """

    def __init__(self, capacity: int, contents: Collection[Stored]) -> None:
        """`contents` is a live view of what is cached, in any order."""
        if capacity < 1:
            raise ValueError(f"an event log holds at least one event, not {capacity}")
        self._waiting: deque[KvEvent] = deque(maxlen=capacity)
        self._contents = contents
        self._number = 0

    def stored(self, block_hash: bytes, parent: bytes | None, token_ids: tuple[int, ...]) -> Stored:
        """Logs that a block became hittable, and returns the event."""
        self._number += 1
        event = Stored(self._number, block_hash, parent, token_ids, len(token_ids))
        self._waiting.append(event)
        return event

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

    def snapshot(self) -> KvSnapshot:
        """The contents now, as of the latest event, drained or not. It visits every cached block."""
        return KvSnapshot(self._number, tuple(self._parents_first()))

    def names(self) -> list[bytes]:
        """The names of the contents now, in any order. It visits every cached block."""
        return [block.block_hash for block in self._contents]

    def _parents_first(self) -> Iterator[Stored]:
        rest = {block.block_hash: block for block in self._contents}
        while rest:
            # A parent that was evicted and stored again is younger than its children.
            lineage = [rest.popitem()[1]]
            while (parent := lineage[-1].parent) is not None and parent in rest:
                lineage.append(rest.pop(parent))
            yield from reversed(lineage)
