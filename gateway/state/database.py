"""An SQLite database that several processes may use at a time."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiosqlite

from catenary.runtime import StartRefused
from catenary.telemetry import get_logger
from gateway.errors import ApiError, unavailable

_log = get_logger(__name__)
_BUSY_S = 10.0
_WAL_BYTES = 16 << 20


class Database:
    """One connection, used by one task at a time; its statements run in a thread of their own.

    Write-ahead log: readers and the writer of other processes do not wait for each other. A commit survives
    the death of the process; the machine's own may take the last ones."""

    def __init__(self, path: Path, schema: str, version: int) -> None:
        """Nothing is opened yet.

        Args:
            path: its file, in a directory that can be written.
            schema: statements that make what is not there yet, with a blank line between two.
            version: of the schema. There is no conversion from another.
        """
        self._path = path
        self._schema = schema
        self._version = version
        self._connection = aiosqlite.connect(path, timeout=_BUSY_S, isolation_level=None)
        self._lock = asyncio.Lock()
        self._closed = False

    async def open(self) -> None:
        """Open or make the database. Raises StartRefused: no SQLite file, or of another version."""
        try:
            await asyncio.to_thread(_try_to_open, self._path)
        except sqlite3.Error:
            raise self._refused() from None
        await self._connection
        try:
            # Before the first table, or it has no effect: pages of what was deleted are given back.
            await self._connection.execute("PRAGMA auto_vacuum = FULL")
            await self._connection.execute("PRAGMA journal_mode = WAL")
            await self._connection.execute("PRAGMA synchronous = NORMAL")
            await self._connection.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
            await self._connection.execute("PRAGMA foreign_keys = ON")
            await self._prepare()
        except (sqlite3.Error, StartRefused) as error:
            await self._connection.close()
            raise error if isinstance(error, StartRefused) else self._refused() from None

    async def close(self) -> None:
        """Close it. Whoever comes later is told that the store does not answer."""
        async with self._lock:
            self._closed = True
            await self._connection.close()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[aiosqlite.Connection]:
        """Statements that count together or, if an exception leaves the block, not at all.

        Raises ApiError 503 for what SQLite raises: the disk is full, the file is locked for too long."""
        async with self._lock:
            self._check_open()
            try:
                await self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                await self._connection.commit()
            except sqlite3.Error as error:
                _log.error("store failed", reason=str(error))
                raise _no_answer() from None
            finally:
                # Does nothing after the commit.
                with suppress(sqlite3.Error):
                    await self._connection.rollback()

    async def fetch(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of a query. Raises ApiError 503 as `transaction` does."""
        async with self._lock:
            self._check_open()
            try:
                rows = await self._connection.execute_fetchall(sql, values)
            except sqlite3.Error as error:
                _log.error("store failed", reason=str(error))
                raise _no_answer() from None
        return [tuple(row) for row in rows]

    def _check_open(self) -> None:
        if self._closed:
            raise _no_answer()

    def _refused(self) -> StartRefused:
        return StartRefused(f"--state-dir: {self._path} is no database that can be written")

    async def _prepare(self) -> None:
        await self._connection.execute("BEGIN IMMEDIATE")
        async with self._connection.execute("PRAGMA user_version") as cursor:
            row = await cursor.fetchone()
        found = row[0] if row is not None else 0
        if found not in (0, self._version):
            raise StartRefused(f"--state-dir: {self._path} was made by another version; move it away")
        for statement in self._schema.split("\n\n"):
            await self._connection.execute(statement)
        await self._connection.execute(f"PRAGMA user_version = {self._version}")
        await self._connection.commit()


def _no_answer() -> ApiError:
    return unavailable("The server's store does not answer.", code="store_unavailable")


def _try_to_open(path: Path) -> None:
    connection = sqlite3.connect(path, timeout=_BUSY_S)
    try:
        connection.execute("PRAGMA schema_version")
    finally:
        connection.close()
