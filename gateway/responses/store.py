"""Responses, the events of their streams and the places of their items in an SQLite database.

Events are stored in chunks; their bytes count among those of their response and are deleted with it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiosqlite

from gateway.errors import ApiError
from gateway.responses.objects import ResponseStatus
from gateway.state.database import Database
from gateway.state.jobs import Jobs, read_totals, totals_schema


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response with its own input, for its owner alone. `response` and `items` are JSON.

    `runner`: the gateway that works on it in the background."""

    id: str
    owner: str
    status: ResponseStatus
    previous: str | None
    response: bytes
    items: bytes
    runner: str | None = None


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Successive events of a stream, as they are sent; `first` is the sequence number of the first."""

    first: int
    events: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class StoredEvents:
    """Next events of a response's stream, perhaps not all of them.

    kept: the response was made with a stream that is stored; dropped: it was, until it became too large;
    final: the response is final, so that nothing follows the last of the events."""

    events: Sequence[bytes]
    kept: bool
    dropped: bool
    final: bool


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Responses, bytes, and seconds since the last use of a response; the least recently used go first."""

    max_count: int
    max_bytes: int
    max_age_s: float


class ConversationTooLarge(Exception):
    """A conversation has more bytes than its reader accepts."""


def not_found() -> ApiError:
    """Return the error 404: no such response, or another owner's."""
    return ApiError(404, "No such response is stored.", code="response_not_found", param="response_id")


VERSION = 1
_RESPONSES = """
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

CREATE INDEX IF NOT EXISTS responses_by_runner ON responses (runner) WHERE runner IS NOT NULL;"""
_STREAMS_ITEMS = """
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
END;

CREATE TABLE IF NOT EXISTS item_places (
  item_id TEXT NOT NULL,
  response_id TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE,
  put_out INTEGER NOT NULL,
  place INTEGER NOT NULL
);

CREATE INDEX IF NOT EXISTS item_places_by_id ON item_places (item_id);

CREATE INDEX IF NOT EXISTS item_places_by_response ON item_places (response_id)"""
SCHEMA = "\n\n".join(
    (_RESPONSES, totals_schema("responses", "count", "added", "changed", "removed"), _STREAMS_ITEMS)
)
_COLUMNS = "responses.id, owner, status, previous, response, items, runner"
_FINAL = [status.value for status in ResponseStatus if status.final]
_CHAIN = """
WITH RECURSIVE chain (id, previous, bytes, depth) AS (
  SELECT id, previous, bytes, 0 FROM responses WHERE id = :id AND owner = :owner AND used >= :since
  UNION ALL
  SELECT r.id, r.previous, r.bytes, chain.depth + 1 FROM chain JOIN responses r ON r.id = chain.previous
  WHERE r.owner = :owner
)
SELECT id, previous, bytes FROM chain ORDER BY depth DESC"""
_CHUNKS = 32
# JSON on one line: no event contains it.
_END = b"\n\n"
_AT_A_TIME = 16
# SQLite reads the JSON, in its own thread: to find one item in a long conversation would block the loop.
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


class ResponseStore:
    """Responses by id, in a file that several gateways of one host may share.

    All methods raise ApiError: 503 if the store does not answer, 507 if its disk is full."""

    def __init__(
        self,
        database: Database,
        limits: StoreLimits,
        *,
        lease_s: float = 10.0,
        clock: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set its limits.

        Args:
            database: with the tables of SCHEMA.
            limits: beyond which responses are deleted.
            lease_s: seconds without a renewal after which a gateway counts as dead.
            clock: Unix time.
            elapsed: seconds of a monotonic clock.
        """
        self.jobs = Jobs(
            database,
            "responses",
            final=_FINAL,
            oldest="used",
            lease_s=lease_s,
            clock=clock,
            elapsed=elapsed,
        )
        self._database = database
        self._limits = limits
        self._clock = clock

    async def add(self, record: StoredResponse, events: Sequence[bytes] | None = None) -> None:
        """Store a response; one with a runner is held by it.

        `events`: the first ones of its stream, which is stored from then on."""
        size = len(record.response) + len(record.items)
        async with self._database.transaction(size) as db:
            await db.execute(
                "INSERT INTO responses (id, owner, status, previous, bytes, used, runner, lease, items, "
                "response) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(record.id, record.owner, record.status.value, record.previous, size, self._clock()),
                    *(record.runner, self.jobs.leases.end(), record.items, record.response),
                ),
            )
            await _add_items(db, record.id, output=False)
            if record.status.final:
                await _add_items(db, record.id, output=True)
            if events is not None:
                await db.execute("INSERT INTO streams VALUES (?, 0, 0, 0)", (record.id,))
                await _append_events(db, record.id, EventBatch(0, events))
            await self._evict(db)

    async def update(
        self, response_id: str, status: ResponseStatus, response: bytes, last: EventBatch | None = None
    ) -> bool:
        """Replace a response that is not final and add events to its stream, both or none.

        Return False if it was final already, or is gone."""

        async def write(db: aiosqlite.Connection) -> bool:
            cursor = await db.execute(
                "UPDATE responses SET status = ?, response = ?, bytes = length(items) + ?, used = ? "
                f"WHERE id = ? AND {self.jobs.open}",
                (status.value, response, len(response), self._clock(), response_id),
            )
            changed = cursor.rowcount == 1
            if changed and status.final:
                await _add_items(db, response_id, output=True)
            if changed and last is not None:
                await _append_events(db, response_id, last)
            await self._evict(db)
            return changed

        if status is ResponseStatus.CANCELLED:
            # As with a delete, a full disk must not keep it from being done.
            return await self._database.essential(write)
        size = len(response) + (0 if last is None else sum(map(len, last.events)))
        async with self._database.transaction(size) as db:
            return await write(db)

    async def add_events(self, batches: Mapping[str, EventBatch], dropped: Collection[str]) -> None:
        """Add to the streams of responses that are not final; delete the events of the `dropped` ones."""
        size = sum(len(event) for batch in batches.values() for event in batch.events)
        async with self._database.transaction(size) as db:
            for response_id, batch in batches.items():
                if await db.execute_fetchall(
                    f"SELECT 1 FROM responses WHERE id = ? AND {self.jobs.open}", (response_id,)
                ):
                    await _append_events(db, response_id, batch)
            for response_id in dropped:
                await db.execute(
                    "UPDATE streams SET size = 0, dropped = 1 WHERE response_id = ?", (response_id,)
                )
                await db.execute("DELETE FROM events WHERE response_id = ?", (response_id,))
            await self._evict(db)

    async def events(self, owner: str, response_id: str, after: int) -> StoredEvents | None:
        """Return events that follow the one with the sequence number `after`; None without the response."""
        found = await self._database.fetch(
            "SELECT status, dropped FROM responses LEFT JOIN streams ON streams.response_id = id "
            "WHERE id = ? AND owner = ?",
            (response_id, owner),
        )
        if not found:
            return None
        status, dropped = found[0]
        final = ResponseStatus(status).final
        if dropped is None or dropped:
            return StoredEvents((), dropped is not None, bool(dropped), final)
        rows = await self._database.fetch(
            "SELECT first, data FROM events WHERE response_id = :id AND first >= "
            "(SELECT coalesce(max(first), 0) FROM events WHERE response_id = :id AND first <= :next) "
            "ORDER BY first LIMIT :count",
            {"id": response_id, "next": after + 1, "count": _CHUNKS},
        )
        events = [event for first, data in rows for event in _split(data)[max(0, after + 1 - first) :]]
        # The status was read before the events: a final response has all of them, if no chunks are left.
        return StoredEvents(events, True, False, final and len(rows) < _CHUNKS)

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return a response, which counts as a use."""
        found = await self._use([response_id], owner)
        return found[0] if found else None

    async def conversation(self, owner: str, response_id: str, max_bytes: int) -> list[StoredResponse] | None:
        """Return a response and all that it continues, oldest first, which counts as a use of each.

        None if one of them is not stored (any more). Raise ConversationTooLarge."""
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
        """Return the JSON of stored items by their ids, which counts as a use of their responses.

        Items are those of all inputs, and of the outputs of final responses; of several with one id, the
        last one."""
        found: list[tuple[Any, ...]] = []
        since = self._since()
        for begin in range(0, len(item_ids), _AT_A_TIME):
            some = item_ids[begin : begin + _AT_A_TIME]
            found += await self._database.fetch(
                _FIND.format(marks=", ".join("?" * len(some))), (owner, since, owner, since, *some)
            )
        await self._use(sorted({response_id for _, _, response_id in found}), owner)
        return {item_id: text.encode() for item_id, text, _ in found}

    async def delete(self, owner: str, response_id: str) -> bool:
        """Delete a response. Return False if it was not stored."""

        async def delete(db: aiosqlite.Connection) -> bool:
            cursor = await db.execute(
                "DELETE FROM responses WHERE id = ? AND owner = ?", (response_id, owner)
            )
            return cursor.rowcount == 1

        return await self._database.essential(delete)

    async def claim(
        self, runner: str, running: Collection[str] = ()
    ) -> tuple[StoredResponse, int | None] | None:
        """Claim a response whose gateway has died, for `runner`; `running`: those of the runner itself.

        Returns it with the sequence number of its stream's next event, None if no stream is stored."""
        next_event = "(SELECT next FROM streams WHERE response_id = responses.id AND NOT dropped)"
        row = await self.jobs.claim(runner, running, f"{_COLUMNS}, {next_event}")
        return None if row is None else (_record(row[:-1]), row[-1])

    async def sweep(self) -> None:
        await self._database.essential(self._evict)

    def _since(self) -> float:
        return self._clock() - self._limits.max_age_s

    async def _use(self, ids: list[str], owner: str) -> list[StoredResponse]:
        """Return those of the responses that are stored, in this order."""
        rows = await self._database.fetch(
            f"SELECT {_COLUMNS} FROM json_each(?) JOIN responses ON responses.id = value "
            "WHERE owner = ? AND used >= ? ORDER BY key",
            (json.dumps(ids), owner, self._since()),
        )
        if rows:
            # Reading succeeds even if the use cannot be recorded.
            with suppress(ApiError):
                async with self._database.transaction() as db:
                    await db.execute(
                        "UPDATE responses SET used = ? "
                        "WHERE id IN (SELECT value FROM json_each(?)) AND owner = ?",
                        (self._clock(), json.dumps(ids), owner),
                    )
        return [_record(row) for row in rows]

    async def _evict(self, db: aiosqlite.Connection) -> None:
        await db.execute(f"DELETE FROM responses WHERE used < ? AND {self.jobs.ended}", (self._since(),))
        while True:
            count, size = await read_totals(db)
            if count <= self._limits.max_count and size <= self._limits.max_bytes:
                return
            cursor = await db.execute(
                f"DELETE FROM responses WHERE id = (SELECT id FROM responses WHERE {self.jobs.ended} "
                "ORDER BY used LIMIT 1)"
            )
            if not cursor.rowcount:
                return


async def _add_items(db: aiosqlite.Connection, response_id: str, *, output: bool) -> None:
    """Note where the items of a response's input, or of its final output, are."""
    await db.execute(_ADD, {"id": response_id, "put_out": int(output)})


async def _append_events(db: aiosqlite.Connection, response_id: str, batch: EventBatch) -> None:
    """Add events to a stream, if it is stored and they are the next ones."""
    data = b"".join(batch.events)
    cursor = await db.execute(
        "UPDATE streams SET size = size + ?, next = next + ? "
        "WHERE response_id = ? AND next = ? AND NOT dropped",
        (len(data), len(batch.events), response_id, batch.first),
    )
    if batch.events and cursor.rowcount:
        await db.execute("INSERT INTO events VALUES (?, ?, ?)", (response_id, batch.first, data))


def _split(data: bytes) -> list[bytes]:
    return [event + _END for event in data.split(_END)[:-1]]


def _record(row: Sequence[Any]) -> StoredResponse:
    response_id, owner, status, *rest = row
    return StoredResponse(response_id, owner, ResponseStatus(status), *rest)
