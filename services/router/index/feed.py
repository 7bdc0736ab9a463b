"""One engine's KV events on their way into the index: numbers, gaps, snapshots."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from enum import Enum
from struct import iter_unpack
from typing import Generic, TypeVar

from catenary.blockhash import DIGEST_BYTES
from catenary.v1 import engine_pb2
from services.router.index.kv_index import KvIndex

# Digests of blocks in one message of an engine, which cuts its snapshots well below that.
MAX_NAMES = 65_536

K = TypeVar("K", bound=Hashable)


class MalformedKv(ValueError):
    """An engine broke the contract of KvChanges or KvSnapshot: the stream ends."""


class _State(Enum):
    # Nothing is known; changes count for nothing until a snapshot begins.
    UNKNOWN = 1
    # Inside of a snapshot.
    PARTIAL = 2
    # What the index has of the engine is what its cache held after the last number.
    SYNCED = 3


class KvFeed(Generic[K]):
    """Follows one attachment of an engine. A snapshot comes first, then the changes after it.

    With a gap, what the index has of the engine goes: a prefix that is not there costs more than a look that
    finds nothing.
    """

    def __init__(self, index: KvIndex[K], engine: K) -> None:
        self._index = index
        self._engine = engine
        self._state = _State.UNKNOWN
        self._number = 0

    @property
    def last_number(self) -> int:
        """Number of the last change that the index has; 0 before the first snapshot."""
        return self._number

    def snapshot(self, part: engine_pb2.KvSnapshot) -> bool:
        """Take a part of a snapshot. Returns whether another snapshot must be asked for.

        Raises:
            MalformedKv: the names are not whole, or too many for one message.
        """
        names = list(_names(part.names))
        if part.first:
            self._index.incomplete(self._engine)
            self._number, self._state = part.number, _State.PARTIAL
        elif self._state is _State.UNKNOWN:
            # The rest of one that was given up.
            return False
        elif self._state is _State.SYNCED or part.number != self._number:
            return self._gap()
        self._index.stored(self._engine, names)
        if part.last:
            self._index.completed(self._engine)
            self._state = _State.SYNCED
        return False

    def changes(self, changes: engine_pb2.KvChanges) -> bool:
        """Take changes. Returns whether a snapshot must be asked for, which is said once for each gap.

        Those that the snapshot has already are passed over.

        Raises:
            MalformedKv: a change of no kind, or names as for `snapshot`.
        """
        if self._state is _State.UNKNOWN:
            return False
        if self._state is _State.PARTIAL or changes.first_number > self._number + 1:
            return self._gap()
        known = self._number + 1 - changes.first_number
        for change in changes.changes:
            kind = change.WhichOneof("kind")
            if kind == "cleared":
                if known < 1:
                    self._index.replace(self._engine, ())
                    self._number += 1
                known = max(0, known - 1)
                continue
            if kind is None:
                raise MalformedKv("a change of no kind")
            names = list(_names(change.stored.names if kind == "stored" else change.removed.names))
            new = names[known:]
            known = max(0, known - len(names))
            apply = self._index.stored if kind == "stored" else self._index.removed
            apply(self._engine, new)
            self._number += len(new)
        return False

    def close(self) -> None:
        """The stream or the attachment is over: nothing is known of the engine. Idempotent."""
        self._state = _State.UNKNOWN
        self._index.forget(self._engine)

    def _gap(self) -> bool:
        self._state = _State.UNKNOWN
        self._index.incomplete(self._engine)
        return True


def _names(packed: bytes) -> Iterator[bytes]:
    if len(packed) % DIGEST_BYTES:
        raise MalformedKv(f"names that are not {DIGEST_BYTES} bytes each")
    if len(packed) > MAX_NAMES * DIGEST_BYTES:
        raise MalformedKv(f"more than {MAX_NAMES} names in one message")
    return (name for (name,) in iter_unpack(f"{DIGEST_BYTES}s", packed))
