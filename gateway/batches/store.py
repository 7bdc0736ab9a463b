"""Stored batches: as the API shows them, and as the gateway that runs one updates them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
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
from gateway.state.database import Database
from gateway.state.jobs import Jobs, totals_schema

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

CREATE INDEX IF NOT EXISTS batches_by_status ON batches (status);"""
SCHEMA += "\n" + totals_schema("files", "files", "file_added", "file_changed", "file_removed")


_COLUMNS = "batch, total, completed, failed"


@dataclass(frozen=True, slots=True)
class ClaimedBatch:
    """Batch to run. `output` and `errors` are the ids of the files to write; `runner` holds it."""

    batch: Batch
    owner: str
    cache_salt: str
    output: str
    errors: str
    runner: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Line of a result file, for the request in line `number` of the input."""

    number: int
    failed: bool
    data: bytes


class BatchStore:
    """Batches by id, each for its owner alone. Methods raise ApiError 503 if the store does not answer."""

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
            database: with the tables of SCHEMA.
            lease_s: seconds for which a gateway holds a batch that it has claimed or renewed.
            max_batches: unfinished batches of all owners.
            clock: Unix time.
            elapsed: seconds of a monotonic clock.
        """
        self.jobs = Jobs(
            database,
            "batches",
            final=FINAL,
            oldest="created",
            lease_s=lease_s,
            clock=clock,
            elapsed=elapsed,
        )
        self._database = database
        self._max_batches = max_batches
        self._clock = clock

    async def add(self, claim: ClaimedBatch, keep_s: float) -> None:
        """Store a new batch, with empty files for its results, which are kept for `keep_s` after its end.

        Raise ApiError 429 if there are too many."""
        batch, now = claim.batch, self._clock()
        async with self._database.transaction() as db:
            ((running,),) = await db.execute_fetchall(f"SELECT COUNT(*) FROM batches WHERE {self.jobs.open}")
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
        rows = await self._database.fetch(
            f"SELECT {_COLUMNS} FROM batches WHERE id = ? AND owner = ?", (batch_id, owner)
        )
        if not rows:
            raise _not_found()
        return _batch(rows[0])

    async def listed(self, owner: str, *, limit: int, after: str | None) -> list[Batch]:
        """Return up to `limit` batches older than `after`, newest first. Raise ApiError 400 without it."""
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
        """Ask the gateway that runs a batch to end it; an ended one stays as it is. Raise ApiError 404."""

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
        """Claim the oldest batch that no living gateway holds. `running`: those of the runner itself."""
        row = await self.jobs.claim(runner, running, f"{_COLUMNS}, owner, cache_salt, output, errors")
        if row is None:
            return None
        owner, cache_salt, output, errors = row[4:]
        return ClaimedBatch(_batch(row[:4]), owner, cache_salt, output, errors, runner)

    async def started(self, claim: ClaimedBatch, total: int) -> None:
        """Note the number of requests of a batch that begins. Raise LeaseLost."""
        async with self._holding(claim) as db:
            await db.execute("UPDATE batches SET total = ? WHERE id = ?", (total, claim.batch.id))
            await _move(db, claim.batch.id, {BatchStatus.VALIDATING}, BatchStatus.IN_PROGRESS, self._clock())

    async def finalizing(self, claim: ClaimedBatch) -> None:
        """Note that all requests of a batch have results. Raise LeaseLost."""
        async with self._holding(claim) as db:
            await _move(db, claim.batch.id, {BatchStatus.IN_PROGRESS}, BatchStatus.FINALIZING, self._clock())

    async def done(self, claim: ClaimedBatch) -> set[int]:
        """Return the numbers of lines that have a result."""
        rows = await self._database.fetch(
            "SELECT number FROM pieces WHERE file IN (?, ?)", (claim.output, claim.errors)
        )
        return {row[0] for row in rows}

    async def record(self, claim: ClaimedBatch, outcomes: Sequence[Outcome]) -> None:
        """Add lines that have no result yet to the files of a batch. Raise LeaseLost."""
        failed = sum(outcome.failed for outcome in outcomes)
        async with self._holding(claim, sum(len(outcome.data) for outcome in outcomes)) as db:
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
        self, claim: ClaimedBatch, status: BatchStatus, problems: Sequence[BatchProblem] = ()
    ) -> None:
        """End a batch: complete its files, and delete those without a line. Raise LeaseLost."""
        now, ids = self._clock(), (claim.output, claim.errors)
        async with self._holding(claim) as db:
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
        """Delete batches that ended as long ago as their files are kept."""
        await self._database.essential(
            lambda db: db.execute_fetchall(
                f"DELETE FROM batches WHERE {self.jobs.ended} AND expires + keep_s < ?",
                (self._clock(),),
            )
        )

    def _holding(
        self, claim: ClaimedBatch, size: int = 0
    ) -> AbstractAsyncContextManager[aiosqlite.Connection]:
        return self.jobs.holding(claim.runner, claim.batch.id, size)


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
