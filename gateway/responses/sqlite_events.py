"""The events of responses' streams in an SQLite database, in chunks of some.

Their bytes count among those of the responses, and they go with them."""

from __future__ import annotations

from collections.abc import Sequence

import aiosqlite

from gateway.responses.objects import ResponseStatus
from gateway.responses.store import EventBatch, StoredEvents
from gateway.state.database import Database

SCHEMA = """
CREATE TABLE IF NOT EXISTS streams (
  response_id TEXT PRIMARY KEY REFERENCES responses (id) ON DELETE CASCADE,
  size INTEGER NOT NULL,
  next INTEGER NOT NULL,
  dropped INTEGER NOT NULL
);

CREATE TABLE IF NOT EXISTS events (
  response_id TEXT NOT NULL REFERENCES streams (response_id) ON DELETE CASCADE,
  first INTEGER NOT NULL,
  data BLOB NOT NULL,
  PRIMARY KEY (response_id, first)
);

CREATE TRIGGER IF NOT EXISTS stream_changed AFTER UPDATE OF size ON streams BEGIN
  UPDATE totals SET bytes = bytes - old.size + new.size;
END;

CREATE TRIGGER IF NOT EXISTS stream_removed AFTER DELETE ON streams BEGIN
  UPDATE totals SET bytes = bytes - old.size;
END"""
_CHUNKS = 32
# No event has it inside: JSON on one line.
_END = b"\n\n"


async def begin(db: aiosqlite.Connection, response_id: str, events: Sequence[bytes]) -> None:
    """Keep a response's stream from now on; `events` are its first ones."""
    await db.execute("INSERT INTO streams VALUES (?, 0, 0, 0)", (response_id,))
    await append(db, response_id, EventBatch(0, events))


async def append(db: aiosqlite.Connection, response_id: str, batch: EventBatch) -> None:
    """Add events to a stream, if it is kept and they are the next ones."""
    data = b"".join(batch.events)
    cursor = await db.execute(
        "UPDATE streams SET size = size + ?, next = next + ? "
        "WHERE response_id = ? AND next = ? AND NOT dropped",
        (len(data), len(batch.events), response_id, batch.first),
    )
    if batch.events and cursor.rowcount:
        await db.execute("INSERT INTO events VALUES (?, ?, ?)", (response_id, batch.first, data))


async def drop(db: aiosqlite.Connection, response_id: str) -> None:
    """Forget a stream's events, and remember that there were some."""
    await db.execute("UPDATE streams SET size = 0, dropped = 1 WHERE response_id = ?", (response_id,))
    await db.execute("DELETE FROM events WHERE response_id = ?", (response_id,))


async def behind(database: Database, owner: str, response_id: str, after: int) -> StoredEvents | None:
    """As `ResponseStore.events`."""
    found = await database.fetch(
        "SELECT status, dropped FROM responses LEFT JOIN streams ON streams.response_id = id "
        "WHERE id = ? AND owner = ?",
        (response_id, owner),
    )
    if not found:
        return None
    status, dropped = found[0]
    if dropped is None or dropped:
        return StoredEvents((), dropped is not None, bool(dropped), ResponseStatus(status).final)
    rows = await database.fetch(
        "SELECT first, data FROM events WHERE response_id = :id AND first >= (SELECT coalesce(max(first), 0) "
        "FROM events WHERE response_id = :id AND first <= :next) ORDER BY first LIMIT :count",
        {"id": response_id, "next": after + 1, "count": _CHUNKS},
    )
    events = [event for first, data in rows for event in _split(data)[max(0, after + 1 - first) :]]
    # The status was read before the events: what is final has all of them, if there are no more chunks.
    return StoredEvents(events, True, False, ResponseStatus(status).final and len(rows) < _CHUNKS)


def _split(data: bytes) -> list[bytes]:
    return [event + _END for event in data.split(_END)[:-1]]
