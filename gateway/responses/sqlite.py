"""Responses in an SQLite database."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiosqlite

from gateway.errors import ApiError
from gateway.responses import sqlite_events, sqlite_items
from gateway.responses.objects import ResponseStatus
from gateway.responses.store import (
    ConversationTooLarge,
    EventBatch,
    ResponseStore,
    StoredEvents,
    StoredResponse,
    StoreLimits,
)
from gateway.state.clock import LeaseClock
from gateway.state.database import RESERVE_BYTES, Database

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
        schema = "\n\n".join((_SCHEMA, sqlite_events.SCHEMA, sqlite_items.SCHEMA))
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
            await sqlite_items.add_input(db, record.id)
            if record.status.final:
                await sqlite_items.add_output(db, record.id)
            if events is not None:
                await sqlite_events.begin(db, record.id, events)
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
                await sqlite_items.add_output(db, response_id)
            if changed and last is not None:
                await sqlite_events.append(db, response_id, last)
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
                    await sqlite_events.append(db, response_id, batch)
            for response_id in dropped:
                await sqlite_events.drop(db, response_id)
            await self._forget(db)

    async def events(self, owner: str, response_id: str, after: int) -> StoredEvents | None:
        return await sqlite_events.behind(self._database, owner, response_id, after)

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
        found = await sqlite_items.find(self._database, owner, item_ids, self._since())
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
