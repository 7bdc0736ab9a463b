"""The other end of a PublishKv stream in tests: keeps the names that it is told, and counts strictly."""

from __future__ import annotations

from collections.abc import Iterator

from catenary.v1 import engine_pb2

NAME_BYTES = 16


def names_of(joined: bytes) -> Iterator[bytes]:
    """The names that are joined in `joined`."""
    assert len(joined) % NAME_BYTES == 0
    return (joined[start : start + NAME_BYTES] for start in range(0, len(joined), NAME_BYTES))


class KvFollower:
    """What a router knows after each message. A number that does not follow the one before is a failure."""

    def __init__(self) -> None:
        self.names: set[bytes] = set()
        self.number = 0
        self.complete = False
        self.snapshots = 0
        self.messages = 0

    def take(self, message: engine_pb2.PublishKvRequest) -> None:
        """Apply a snapshot's part or changes."""
        self.messages += 1
        match message.WhichOneof("payload"):
            case "snapshot":
                self._snapshot(message.snapshot)
            case "changes":
                self._changes(message.changes)
            case other:
                raise AssertionError(f"an engine published {other}")

    def _snapshot(self, part: engine_pb2.KvSnapshot) -> None:
        assert part.number >= self.number
        assert part.first or not self.complete
        if part.first:
            self.names.clear()
        new = set(names_of(part.names))
        assert len(part.names) == NAME_BYTES * len(new)
        assert not new & self.names
        self.names |= new
        self.number, self.complete = part.number, part.last
        self.snapshots += part.last

    def _changes(self, changes: engine_pb2.KvChanges) -> None:
        assert self.complete
        assert changes.first_number == self.number + 1
        for change in changes.changes:
            match change.WhichOneof("kind"):
                case "cleared":
                    assert change.cleared
                    self.names.clear()
                    self.number += 1
                case "stored":
                    self._each(change.stored.names, stored=True)
                case "removed":
                    self._each(change.removed.names, stored=False)
                case other:
                    raise AssertionError(f"a change of kind {other}")

    def _each(self, joined: bytes, *, stored: bool) -> None:
        for name in names_of(joined):
            self.number += 1
            assert (name in self.names) is not stored
            if stored:
                self.names.add(name)
            else:
                self.names.remove(name)
