"""Stored batches: what the API shows of them, and what the gateway that runs one writes down."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import aiosqlite

from gateway.batches.objects import (
    FINAL,
    Batch,
    BatchProblem,
    BatchProblems,
    BatchStatus,
    RequestCounts,
    decode_batch,
    encode_batch,
)
from gateway.errors import ApiError, bad_request, overloaded
from gateway.state import Database, LeaseClock

VERSION = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
  id TEXT PRIMARY KEY,
  owner TEXT NOT NULL,
  purpose TEXT NOT NULL,
  filename TEXT NOT NULL,
  bytes INTEGER NOT NULL DEFAULT 0,
  created REAL NOT NULL,
  expires REAL,
  ready INTEGER NOT NULL DEFAULT 0
);

CREATE INDEX IF NOT EXISTS files_by_age ON files (owner, created);

CREATE TABLE IF NOT EXISTS pieces (
  file TEXT NOT NULL REFERENCES files ON DELETE CASCADE,
  number INTEGER NOT NULL,
  data BLOB NOT NULL,
  PRIMARY KEY (file, number)
);

CREATE TABLE IF NOT EXISTS batches (
  id TEXT PRIMARY KEY,
  owner TEXT NOT NULL,
  cache_salt TEXT NOT NULL,
  status TEXT NOT NULL,
  created REAL NOT NULL,
  expires REAL NOT NULL,
  keep_s REAL NOT NULL,
  runner TEXT,
  lease REAL,
  total INTEGER NOT NULL DEFAULT 0,
  completed INTEGER NOT NULL DEFAULT 0,
  failed INTEGER NOT NULL DEFAULT 0,
  input TEXT NOT NULL,
  output TEXT NOT NULL,
  errors TEXT NOT NULL,
  batch BLOB NOT NULL
);

CREATE INDEX IF NOT EXISTS batches_by_age ON batches (owner, created);

CREATE INDEX IF NOT EXISTS batches_by_status ON batches (status);

CREATE TABLE IF NOT EXISTS totals (one INTEGER PRIMARY KEY, files INTEGER NOT NULL, bytes INTEGER NOT NULL);

INSERT OR IGNORE INTO totals VALUES (1, 0, 0);

CREATE TRIGGER IF NOT EXISTS file_added AFTER INSERT ON files BEGIN
  UPDATE totals SET files = files + 1, bytes = bytes + new.bytes;
END;

CREATE TRIGGER IF NOT EXISTS file_changed AFTER UPDATE OF bytes ON files BEGIN
  UPDATE totals SET bytes = bytes - old.bytes + new.bytes;
END;

CREATE TRIGGER IF NOT EXISTS file_removed AFTER DELETE ON files BEGIN
  UPDATE totals SET files = files - 1, bytes = bytes - old.bytes;
END"""


_COLUMNS = "batch, total, completed, failed"
_FINAL = "(" + ", ".join(f"'{status.value}'" for status in sorted(FINAL)) + ")"

_FREE = (
    f"SELECT id FROM batches WHERE status NOT IN {_FINAL} "
    "AND (runner IS NULL OR lease NOT BETWEEN :from AND :to) "
    "AND id NOT IN (SELECT value FROM json_each(:running)) ORDER BY created LIMIT 1"
)


class LeaseLost(Exception):
    """Another gateway has taken the batch over, or it is gone: its former runner must stop."""


@dataclass(frozen=True, slots=True)
class ClaimedBatch:
    """A batch to run. `output` and `errors` are the ids of the files to write."""

    batch: Batch
    owner: str
    cache_salt: str
    output: str
    errors: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """A line of a result file: that of the request in line `number` of the input."""

    number: int
    failed: bool
    data: bytes


class BatchStore:
    """Batches by id, each for its owner alone. ApiError 503: the store does not answer."""

    def __init__(
        self,
        database: Database,
        *,
        lease_s: float,
        max_batches: int,
        clock: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set its limits.

        Args:
            database: with the tables of `schema`.
            lease_s: seconds for which a gateway has a batch that it has claimed or renewed.
            max_batches: batches of all owners that have not ended.
            clock: Unix time.
            elapsed: seconds of a monotonic clock.
        """
        self._leases = LeaseClock(lease_s, clock, elapsed)
        self._database = database
        self._lease_s = lease_s
        self._max_batches = max_batches
        self._clock = clock

    async def add(self, claim: ClaimedBatch, keep_s: float) -> None:
        """Keep a new batch, with empty files for its results that live for `keep_s` after its end.

        Raises ApiError 429 if there are too many."""
        batch, now = claim.batch, self._clock()
        async with self._database.transaction() as db:
            ((running,),) = await db.execute_fetchall(
                f"SELECT COUNT(*) FROM batches WHERE status NOT IN {_FINAL}"
            )
            if running >= self._max_batches:
                raise overloaded(f"The server has its limit of {self._max_batches} unfinished batches.")
            for file_id, kind in ((claim.output, "output"), (claim.errors, "error")):
                await db.execute(
                    "INSERT INTO files (id, owner, purpose, filename, created) "
                    "VALUES (?, ?, 'batch_output', ?, ?)",
                    (file_id, claim.owner, f"{batch.id}_{kind}.jsonl", now),
                )
            await db.execute(
                "INSERT INTO batches (id, owner, cache_salt, status, created, expires, keep_s, input, "
                "output, errors, batch) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(batch.id, claim.owner, claim.cache_salt, batch.status.value, now, batch.expires_at),
                    *(keep_s, batch.input_file_id, claim.output, claim.errors, encode_batch(batch)),
                ),
            )

    async def get(self, owner: str, batch_id: str) -> Batch:
        """A batch. Raises ApiError 404."""
        rows = await self._database.fetch(
            f"SELECT {_COLUMNS} FROM batches WHERE id = ? AND owner = ?", (batch_id, owner)
        )
        if not rows:
            raise _not_found()
        return _batch(rows[0])

    async def listed(self, owner: str, *, limit: int, after: str | None) -> list[Batch]:
        """Up to `limit` batches older than `after`, newest first. Raises ApiError 400 if that is none."""
        where, values = "owner = ?", [owner]
        if after is not None:
            anchor = await self._database.fetch(
                "SELECT created, id FROM batches WHERE id = ? AND owner = ?", (after, owner)
            )
            if not anchor:
                raise bad_request("Invalid 'after': there is no batch of that id.", "after")
            where, values = f"{where} AND (created, id) < (?, ?)", [*values, *anchor[0]]
        rows = await self._database.fetch(
            f"SELECT {_COLUMNS} FROM batches WHERE {where} ORDER BY created DESC, id DESC LIMIT ?",
            (*values, limit),
        )
        return [_batch(row) for row in rows]

    async def cancel(self, owner: str, batch_id: str) -> Batch:
        """Ask the gateway that runs a batch to end it; an ended one stays as it is. Raises ApiError 404."""

        async def cancel(db: aiosqlite.Connection) -> Batch:
            rows = await db.execute_fetchall(
                "SELECT 1 FROM batches WHERE id = ? AND owner = ?", (batch_id, owner)
            )
            if not rows:
                raise _not_found()
            running = {BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS}
            return await _move(db, batch_id, running, BatchStatus.CANCELLING, self._clock())

        return await self._database.essential(cancel)

    async def claim(self, runner: str, running: Collection[str] = ()) -> ClaimedBatch | None:
        """The oldest batch that has not ended and that no living gateway runs, for `runner`. Those of the ids
        `running` it has."""
        earliest, latest = self._leases.valid()
        free = {"from": earliest, "to": latest, "running": json.dumps(list(running))}
        # A look takes no lock; most looks find nothing.
        if not await self._database.fetch(_FREE, free):
            return None
        async with self._database.transaction() as db:
            rows = await db.execute_fetchall(
                f"UPDATE batches SET runner = :runner, lease = :lease WHERE id = ({_FREE}) "
                f"RETURNING {_COLUMNS}, owner, cache_salt, output, errors",
                {**free, "runner": runner, "lease": self._clock() + self._lease_s},
            )
        for row in rows:
            return ClaimedBatch(_batch(tuple(row)[:4]), *tuple(row)[4:])
        return None

    async def renew(self, runner: str, batch_id: str) -> BatchStatus:
        """Hold a batch for another while. Its status. Raises LeaseLost."""
        async with self._database.transaction() as db:
            return await self._held(db, runner, batch_id)

    async def release(self, runner: str) -> None:
        """Give back all batches of a gateway that stops."""
        async with self._database.transaction() as db:
            await db.execute("UPDATE batches SET runner = NULL WHERE runner = ?", (runner,))

    async def started(self, runner: str, batch_id: str, total: int) -> None:
        """Note the number of requests of a batch that begins. Raises LeaseLost."""
        async with self._database.transaction() as db:
            await self._held(db, runner, batch_id)
            await db.execute("UPDATE batches SET total = ? WHERE id = ?", (total, batch_id))
            await _move(db, batch_id, {BatchStatus.VALIDATING}, BatchStatus.IN_PROGRESS, self._clock())

    async def finalizing(self, runner: str, batch_id: str) -> None:
        """Note that all requests of a batch have results. Raises LeaseLost."""
        async with self._database.transaction() as db:
            await self._held(db, runner, batch_id)
            await _move(db, batch_id, {BatchStatus.IN_PROGRESS}, BatchStatus.FINALIZING, self._clock())

    async def done(self, claim: ClaimedBatch) -> set[int]:
        """The numbers of the lines that have a result."""
        rows = await self._database.fetch(
            "SELECT number FROM pieces WHERE file IN (?, ?)", (claim.output, claim.errors)
        )
        return {row[0] for row in rows}

    async def record(self, runner: str, claim: ClaimedBatch, outcomes: Sequence[Outcome]) -> None:
        """Add lines that have no result yet to the files of a batch. Raises LeaseLost."""
        failed = sum(outcome.failed for outcome in outcomes)
        async with self._database.transaction(sum(len(outcome.data) for outcome in outcomes)) as db:
            await self._held(db, runner, claim.batch.id)
            for outcome in outcomes:
                file_id = claim.errors if outcome.failed else claim.output
                await db.execute(
                    "INSERT INTO pieces VALUES (?, ?, ?)", (file_id, outcome.number, outcome.data)
                )
                await db.execute(
                    "UPDATE files SET bytes = bytes + ? WHERE id = ?", (len(outcome.data), file_id)
                )
            await db.execute(
                "UPDATE batches SET completed = completed + ?, failed = failed + ? WHERE id = ?",
                (len(outcomes) - failed, failed, claim.batch.id),
            )

    async def finish(
        self,
        runner: str,
        claim: ClaimedBatch,
        status: BatchStatus,
        problems: Sequence[BatchProblem] = (),
    ) -> None:
        """End a batch: its files are complete, and those without a line are gone. Raises LeaseLost."""
        now, ids = self._clock(), (claim.output, claim.errors)
        async with self._database.transaction() as db:
            await self._held(db, runner, claim.batch.id)
            await db.execute(
                "UPDATE files SET ready = 1, created = ?, "
                "expires = ? + (SELECT keep_s FROM batches WHERE id = ?) WHERE id IN (?, ?) AND bytes > 0",
                (now, now, claim.batch.id, *ids),
            )
            await db.execute("DELETE FROM files WHERE id IN (?, ?) AND ready = 0", ids)
            kept = {
                row[0] for row in await db.execute_fetchall("SELECT id FROM files WHERE id IN (?, ?)", ids)
            }
            batch = await _current(db, claim.batch.id)
            batch.output_file_id = claim.output if claim.output in kept else None
            batch.error_file_id = claim.errors if claim.errors in kept else None
            batch.errors = BatchProblems(list(problems)) if problems else None
            batch.moved(status, now)
            await _write(db, batch)
            await db.execute("UPDATE batches SET runner = NULL WHERE id = ?", (batch.id,))

    async def sweep(self) -> None:
        """Forget batches that ended long ago: as long as their files are kept."""
        await self._database.essential(
            lambda db: db.execute_fetchall(
                f"DELETE FROM batches WHERE status IN {_FINAL} AND expires + keep_s < ?", (self._clock(),)
            )
        )

    async def _held(self, db: aiosqlite.Connection, runner: str, batch_id: str) -> BatchStatus:
        rows = await db.execute_fetchall(
            "UPDATE batches SET lease = ? WHERE id = ? AND runner = ? RETURNING status",
            (self._clock() + self._lease_s, batch_id, runner),
        )
        for row in rows:
            return BatchStatus(row[0])
        raise LeaseLost


async def _current(db: aiosqlite.Connection, batch_id: str) -> Batch:
    (row,) = await db.execute_fetchall(f"SELECT {_COLUMNS} FROM batches WHERE id = ?", (batch_id,))
    return _batch(tuple(row))


async def _move(
    db: aiosqlite.Connection, batch_id: str, before: set[BatchStatus], after: BatchStatus, now: float
) -> Batch:
    batch = await _current(db, batch_id)
    if batch.status in before:
        batch.moved(after, now)
        await _write(db, batch)
    return batch


async def _write(db: aiosqlite.Connection, batch: Batch) -> None:
    await db.execute(
        "UPDATE batches SET batch = ?, status = ? WHERE id = ?",
        (encode_batch(batch), batch.status.value, batch.id),
    )


def _batch(row: tuple[Any, ...]) -> Batch:
    data, total, completed, failed = row
    batch = decode_batch(data)
    batch.request_counts = RequestCounts(total, completed, failed)
    return batch


def _not_found() -> ApiError:
    return ApiError(404, "No such batch is stored.", code="batch_not_found", param="batch_id")
