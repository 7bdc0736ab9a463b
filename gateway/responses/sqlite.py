"""Responses, the events of their streams and the places of their items in an SQLite database.

The events are in chunks of some; their bytes count among those of the responses, and they go with them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiosqlite

from gateway.errors import ApiError
from gateway.responses.objects import ResponseStatus
from gateway.responses.store import (
    ConversationTooLarge,
    EventBatch,
    ResponseStore,
    StoredEvents,
    StoredResponse,
    StoreLimits,
)
from gateway.state import RESERVE_BYTES, Database, LeaseClock

EVENTS_SCHEMA = """
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


async def begin_events(db: aiosqlite.Connection, response_id: str, events: Sequence[bytes]) -> None:
    """Keep a response's stream from now on; `events` are its first ones."""
    await db.execute("INSERT INTO streams VALUES (?, 0, 0, 0)", (response_id,))
    await append_events(db, response_id, EventBatch(0, events))


async def append_events(db: aiosqlite.Connection, response_id: str, batch: EventBatch) -> None:
    """Add events to a stream, if it is kept and they are the next ones."""
    data = b"".join(batch.events)
    cursor = await db.execute(
        "UPDATE streams SET size = size + ?, next = next + ? "
        "WHERE response_id = ? AND next = ? AND NOT dropped",
        (len(data), len(batch.events), response_id, batch.first),
    )
    if batch.events and cursor.rowcount:
        await db.execute("INSERT INTO events VALUES (?, ?, ?)", (response_id, batch.first, data))


async def drop_events(db: aiosqlite.Connection, response_id: str) -> None:
    """Forget a stream's events, and remember that there were some."""
    await db.execute("UPDATE streams SET size = 0, dropped = 1 WHERE response_id = ?", (response_id,))
    await db.execute("DELETE FROM events WHERE response_id = ?", (response_id,))


async def events_behind(database: Database, owner: str, response_id: str, after: int) -> StoredEvents | None:
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


ITEMS_SCHEMA = """
CREATE TABLE IF NOT EXISTS item_places (
  item_id TEXT NOT NULL,
  response_id TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE,
  put_out INTEGER NOT NULL,
  place INTEGER NOT NULL
);

CREATE INDEX IF NOT EXISTS item_places_by_id ON item_places (item_id);

CREATE INDEX IF NOT EXISTS item_places_by_response ON item_places (response_id)"""
_AT_A_TIME = 16
# SQLite reads the JSON, beside the loop: of a long conversation one item may be wanted.
_ADD = """
INSERT INTO item_places
SELECT json_extract(value, '$.id'), responses.id, :put_out, key FROM responses, json_each(
  CASE WHEN :put_out THEN json_extract(CAST(response AS TEXT), '$.output') ELSE CAST(items AS TEXT) END
) WHERE responses.id = :id AND json_extract(value, '$.id') IS NOT NULL"""
_FIND = """
SELECT item_id, json_extract(
  CASE WHEN put_out THEN CAST(response AS TEXT) ELSE CAST(items AS TEXT) END,
  CASE WHEN put_out THEN '$.output[' ELSE '$[' END || place || ']'
), response_id FROM item_places JOIN responses ON responses.id = response_id
WHERE owner = ? AND used >= ? AND item_places.rowid IN (
  SELECT max(places.rowid) FROM item_places places JOIN responses ON responses.id = places.response_id
  WHERE owner = ? AND used >= ? AND places.item_id IN ({marks}) GROUP BY places.item_id
)"""


async def add_input(db: aiosqlite.Connection, response_id: str) -> None:
    """Remember where the items of a response's input are."""
    await db.execute(_ADD, {"id": response_id, "put_out": 0})


async def add_output(db: aiosqlite.Connection, response_id: str) -> None:
    """Remember where the items of a final response's output are."""
    await db.execute(_ADD, {"id": response_id, "put_out": 1})


async def find_items(
    database: Database, owner: str, item_ids: Sequence[str], since: float
) -> list[tuple[str, bytes, str]]:
    """The items with these ids in an owner's responses that were used `since`: each one's id, its JSON and
    its response's id. Of several with an id the one that was stored last."""
    found = []
    for begin in range(0, len(item_ids), _AT_A_TIME):
        some = item_ids[begin : begin + _AT_A_TIME]
        rows = await database.fetch(
            _FIND.format(marks=", ".join("?" * len(some))), (owner, since, owner, since, *some)
        )
        found += [(item_id, text.encode(), response_id) for item_id, text, response_id in rows]
    return found


_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
  id TEXT PRIMARY KEY,
  owner TEXT NOT NULL,
  status TEXT NOT NULL,
  previous TEXT,
  bytes INTEGER NOT NULL,
  used REAL NOT NULL,
  runner TEXT,
  lease REAL,
  items BLOB NOT NULL,
  response BLOB NOT NULL
);

CREATE INDEX IF NOT EXISTS responses_by_use ON responses (used);

CREATE INDEX IF NOT EXISTS responses_by_runner ON responses (runner) WHERE runner IS NOT NULL;

CREATE TABLE IF NOT EXISTS totals (one INTEGER PRIMARY KEY, count INTEGER NOT NULL, bytes INTEGER NOT NULL);

INSERT OR IGNORE INTO totals VALUES (1, 0, 0);

CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses BEGIN
  UPDATE totals SET count = count + 1, bytes = bytes + new.bytes;
END;

CREATE TRIGGER IF NOT EXISTS changed AFTER UPDATE OF bytes ON responses BEGIN
  UPDATE totals SET bytes = bytes - old.bytes + new.bytes;
END;

CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON responses BEGIN
  UPDATE totals SET count = count - 1, bytes = bytes - old.bytes;
END"""
_COLUMNS = "responses.id, owner, status, previous, response, items, runner"
_OPEN = "('queued', 'in_progress')"
_CHAIN = """
WITH RECURSIVE chain (id, previous, bytes, depth) AS (
  SELECT id, previous, bytes, 0 FROM responses WHERE id = :id AND owner = :owner AND used >= :since
  UNION ALL
  SELECT r.id, r.previous, r.bytes, chain.depth + 1 FROM chain JOIN responses r ON r.id = chain.previous
  WHERE r.owner = :owner
)
SELECT id, previous, bytes FROM chain ORDER BY depth DESC"""


class SqliteStore(ResponseStore):
    """A store that several gateways of one host may share."""

    def __init__(
        self,
        path: Path,
        limits: StoreLimits,
        *,
        reserve_bytes: int = RESERVE_BYTES,
        lease_s: float = 10.0,
        clock: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        schema = "\n\n".join((_SCHEMA, EVENTS_SCHEMA, ITEMS_SCHEMA))
        self._database = Database(path, schema, _VERSION, reserve_bytes=reserve_bytes)
        self._limits = limits
        self._leases = LeaseClock(lease_s, clock, elapsed)
        self._clock = clock

    async def open(self) -> None:
        await self._database.open()

    async def add(
        self, record: StoredResponse, lease_s: float = 0.0, events: Sequence[bytes] | None = None
    ) -> None:
        now = self._clock()
        size = len(record.response) + len(record.items)
        async with self._database.transaction(size) as db:
            await db.execute(
                "INSERT INTO responses (id, owner, status, previous, bytes, used, runner, lease, items, "
                "response) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(record.id, record.owner, record.status.value, record.previous, size, now),
                    *(record.runner, now + lease_s, record.items, record.response),
                ),
            )
            await add_input(db, record.id)
            if record.status.final:
                await add_output(db, record.id)
            if events is not None:
                await begin_events(db, record.id, events)
            await self._forget(db)

    async def update(
        self, response_id: str, status: ResponseStatus, response: bytes, last: EventBatch | None = None
    ) -> bool:
        async def write(db: aiosqlite.Connection) -> bool:
            cursor = await db.execute(
                "UPDATE responses SET status = ?, response = ?, bytes = length(items) + ?, used = ? "
                f"WHERE id = ? AND status IN {_OPEN}",
                (status.value, response, len(response), self._clock(), response_id),
            )
            changed = cursor.rowcount == 1
            if changed and status.final:
                await add_output(db, response_id)
            if changed and last is not None:
                await append_events(db, response_id, last)
            await self._forget(db)
            return changed

        if status is ResponseStatus.CANCELLED:
            # As with a delete, a full disk must not keep it from being done.
            return await self._database.essential(write)
        size = len(response) + (0 if last is None else sum(map(len, last.events)))
        async with self._database.transaction(size) as db:
            return await write(db)

    async def add_events(self, batches: Mapping[str, EventBatch], dropped: Collection[str]) -> None:
        size = sum(len(event) for batch in batches.values() for event in batch.events)
        async with self._database.transaction(size) as db:
            for response_id, batch in batches.items():
                if await db.execute_fetchall(
                    f"SELECT 1 FROM responses WHERE id = ? AND status IN {_OPEN}", (response_id,)
                ):
                    await append_events(db, response_id, batch)
            for response_id in dropped:
                await drop_events(db, response_id)
            await self._forget(db)

    async def events(self, owner: str, response_id: str, after: int) -> StoredEvents | None:
        return await events_behind(self._database, owner, response_id, after)

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        found = await self._use([response_id], owner)
        return found[0] if found else None

    async def conversation(self, owner: str, response_id: str, max_bytes: int) -> list[StoredResponse] | None:
        chain = await self._database.fetch(
            _CHAIN, {"id": response_id, "owner": owner, "since": self._since()}
        )
        if not chain or chain[0][1] is not None:
            return None
        if sum(size for _, _, size in chain) > max_bytes:
            raise ConversationTooLarge
        found = await self._use([link[0] for link in chain], owner)
        return found if len(found) == len(chain) else None

    async def items(self, owner: str, item_ids: Sequence[str]) -> dict[str, bytes]:
        found = await find_items(self._database, owner, item_ids, self._since())
        await self._use(sorted({response_id for _, _, response_id in found}), owner)
        return {item_id: data for item_id, data, _ in found}

    async def delete(self, owner: str, response_id: str) -> bool:
        async def delete(db: aiosqlite.Connection) -> bool:
            cursor = await db.execute(
                "DELETE FROM responses WHERE id = ? AND owner = ?", (response_id, owner)
            )
            return cursor.rowcount == 1

        return await self._database.essential(delete)

    async def renew(self, runner: str, lease_s: float) -> set[str]:
        async with self._database.transaction() as db:
            await db.execute(
                f"UPDATE responses SET lease = ? WHERE runner = ? AND status IN {_OPEN}",
                (self._clock() + lease_s, runner),
            )
            rows = await db.execute_fetchall(
                f"SELECT id FROM responses WHERE runner = ? AND status IN {_OPEN}", (runner,)
            )
            return {row[0] for row in rows}

    async def abandoned(self) -> list[StoredResponse]:
        rows = await self._database.fetch(
            f"SELECT {_COLUMNS}, next FROM responses LEFT JOIN streams ON streams.response_id = responses.id "
            f"AND NOT dropped WHERE runner IS NOT NULL AND lease NOT BETWEEN ? AND ? AND status IN {_OPEN}",
            self._leases.valid(),
        )
        return [_record(row) for row in rows]

    async def sweep(self) -> None:
        await self._database.essential(self._forget)

    async def close(self) -> None:
        await self._database.close()

    def _since(self) -> float:
        return self._clock() - self._limits.max_age_s

    async def _use(self, ids: list[str], owner: str) -> list[StoredResponse]:
        """Those of the responses that are there, in this order."""
        rows = await self._database.fetch(
            f"SELECT {_COLUMNS} FROM json_each(?) JOIN responses ON responses.id = value "
            "WHERE owner = ? AND used >= ? ORDER BY key",
            (json.dumps(ids), owner, self._since()),
        )
        if rows:
            # What can be read is read, though it cannot be written down that it was.
            with suppress(ApiError):
                async with self._database.transaction() as db:
                    await db.execute(
                        "UPDATE responses SET used = ? "
                        "WHERE id IN (SELECT value FROM json_each(?)) AND owner = ?",
                        (self._clock(), json.dumps(ids), owner),
                    )
        return [_record(row) for row in rows]

    async def _forget(self, db: aiosqlite.Connection) -> None:
        await db.execute(f"DELETE FROM responses WHERE used < ? AND status NOT IN {_OPEN}", (self._since(),))
        while True:
            ((count, size),) = await db.execute_fetchall("SELECT count, bytes FROM totals")
            if count <= self._limits.max_count and size <= self._limits.max_bytes:
                return
            cursor = await db.execute(
                f"DELETE FROM responses WHERE id = (SELECT id FROM responses WHERE status NOT IN {_OPEN} "
                "ORDER BY used LIMIT 1)"
            )
            if not cursor.rowcount:
                return


def _record(row: tuple[Any, ...]) -> StoredResponse:
    response_id, owner, status, *rest = row
    return StoredResponse(response_id, owner, ResponseStatus(status), *rest)
