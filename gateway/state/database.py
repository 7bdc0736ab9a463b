"""A directory for state, and databases in it that several gateways of one host may share."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import aiosqlite

from catenary.config import ConfigError
from catenary.directories import NoHomeError, expanded
from catenary.runtime import StartRefused
from catenary.telemetry import get_logger
from gateway.errors import SERVER_ERROR, ApiError, unavailable

_log = get_logger(__name__)
_T = TypeVar("_T")


class StateDirectory:
    """A directory whose files only this user can read. `path` None: nothing can be stored."""

    def __init__(self, path: Path | None, temporary: tempfile.TemporaryDirectory[str] | None = None) -> None:
        self.path = path
        self._temporary = temporary

    @classmethod
    def open(cls, configured: Path | None, port: int) -> Self:
        """Open the directory of the option `state_dir`; without it one for the port, or a temporary one for
        port 0, which is another port at each start.

        Raise StartRefused if the configured one cannot be written. If a default cannot be written, as in a
        container without a volume, nothing can be stored, and the log says so.
        """
        if configured is not None:
            try:
                return cls(_made(expanded(configured)))
            except NoHomeError as error:
                raise ConfigError(f"--state-dir: {error}") from None
            except OSError as error:
                raise ConfigError(f"--state-dir: {configured} cannot be written: {error.strerror}") from None
        try:
            if not port:
                temporary = tempfile.TemporaryDirectory(prefix="catenary-gateway-")
                return cls(Path(temporary.name), temporary)
            base = expanded(os.environ.get("XDG_STATE_HOME") or "~/.local/state")
            return cls(_made(base / "catenary" / f"gateway-{port}"))
        except (OSError, NoHomeError):
            _log.warning("nothing can be stored: no directory for state can be written; see --state-dir")
            return cls(None)

    def close(self) -> None:
        """Remove the directory if it is temporary."""
        if self._temporary is not None:
            self._temporary.cleanup()


def _made(path: Path) -> Path:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_mode & 0o077:
        # It existed before, and may hold files that other users read: its mode is left as it is.
        _log.warning(
            "others may list the state directory; the files in it are for this user alone", path=str(path)
        )
    with tempfile.TemporaryFile(dir=path):
        return path


_BUSY_S = 10.0
_ANSWER_S = 30.0
_PAGE = 4096
# Most and fewest pages of the write-ahead log, after which they are written to the database. Until then log
# and database need room for them, which on a full disk is that of the reserve.
_LOG_PAGES = 512
_FEWEST_LOG_PAGES = 16
_SMALL = 64 << 10
# Deleted pages that are given back at a time, and on a disk that has no room for so many.
_GIVE_BACK = (1024, 32)
_FULL_DISK = "disk_full"
_UNKNOWN = 1 << 62
_INCREMENTAL = 2
RESERVE_BYTES = 4 << 20
_RESERVE = "reserve"
# The reserve is at most one part of so many of its disk.
_PART_OF_DISK = 16


class Database:
    """One connection, used by one task at a time; its statements run in a thread of their own.

    Write-ahead log: readers and the writer of other processes do not wait for each other. A commit survives
    the death of the process; a crash of the machine may lose the last ones.

    On a full disk only additions fail: reading needs no room, and `essential` statements have the reserve."""

    def __init__(self, path: Path, schema: str, version: int, *, reserve_bytes: int = RESERVE_BYTES) -> None:
        """Open nothing yet.

        Args:
            path: its file, in a directory that can be written.
            schema: statements that make what does not exist yet, with a blank line between two.
            version: of the schema. There is no conversion from another.
            reserve_bytes: of the disk, reserved for `essential` statements of all databases of the directory.
        """
        self._path = path
        self._schema = schema
        self._version = version
        self._disk = Disk(path.parent, reserve_bytes)
        self._connection = self._connect()
        self._lock = asyncio.Lock()
        self._closed = False

    async def open(self) -> None:
        """Open or make the database; its files are for this user alone.

        Raise StartRefused: no SQLite file, another version's, or a disk that is full or read-only."""
        try:
            await self._open()
        except sqlite3.Error as error:
            # Opening writes a little.
            if not await asyncio.to_thread(self._is_full, error):
                raise self._refused(error) from None
            await asyncio.to_thread(self._disk.give_up)
            self._connection = self._connect()
            try:
                await self._open()
            except sqlite3.Error as again:
                raise self._refused(again) from None
            await self._empty_log()
        await asyncio.to_thread(self._disk.keep)

    async def close(self) -> None:
        """Close the connection. Later calls raise ApiError 503."""
        async with self._lock:
            self._closed = True
            await self._connection.close()

    @asynccontextmanager
    async def transaction(self, size: int = 0) -> AsyncIterator[aiosqlite.Connection]:
        """Run the statements of the block as one transaction, which an exception rolls back.

        Raise ApiError for SQLite's errors: 507 if the disk is full, 503 if the file is locked for too long or
        cannot be written.

        Args:
            size: bytes that are added, if they may be many: they are refused before they fill the disk.
        """
        async with self._answering():
            if size >= _SMALL and not await self._has_room(2 * size):
                raise disk_full()
            try:
                await self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                await self._connection.commit()
            finally:
                # Does nothing after the commit.
                with suppress(sqlite3.Error):
                    await self._connection.rollback()

    async def essential(self, statements: Callable[[aiosqlite.Connection], Awaitable[_T]]) -> _T:
        """Run statements that delete or end something as one transaction, on a full disk too. They may be run
        twice. Give the room that they free back to the disk. Raise ApiError as `transaction` does."""
        try:
            async with self.transaction() as db:
                done = await statements(db)
        except ApiError as error:
            if error.code != _FULL_DISK:
                raise
            await asyncio.to_thread(self._disk.give_up)
            await self._empty_log()
            async with self.transaction() as db:
                done = await statements(db)
        # The statements are committed, whether room can be given back or not.
        with suppress(ApiError):
            await self._give_back()
        await asyncio.to_thread(self._disk.keep)
        return done

    async def check_room(self, size: int) -> None:
        """Raise ApiError 507 if the disk has no room for `size` bytes that are added in pieces."""
        if size < _SMALL:
            return
        async with self._answering():
            # Pieces are for a while both in the log and in the database.
            if not await self._has_room(size + size // 16 + min(size, 2 * _LOG_PAGES * _PAGE)):
                raise disk_full()

    async def fetch(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a query. Raise ApiError as `transaction` does."""
        async with self._answering():
            rows = await self._connection.execute_fetchall(sql, values)
        return [tuple(row) for row in rows]

    @asynccontextmanager
    async def _answering(self) -> AsyncIterator[None]:
        """Hold the connection. Raise ApiError: 503 if it is closed or held by others for too long, and as
        `transaction` for SQLite's errors."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._lock.acquire()
        except TimeoutError:
            _log.error("store failed", store=self._path.name, reason=f"no answer for {_ANSWER_S:g} s")
            raise _no_answer() from None
        try:
            if self._closed:
                raise _no_answer()
            yield
        except sqlite3.Error as error:
            raise await self._failed(error) from None
        finally:
            self._lock.release()

    async def _has_room(self, size: int) -> bool:
        """Return whether `size` bytes more can be written, and the log be moved into the database."""
        if await self._measured() >= size:
            return True
        # Emptying the log frees its room.
        with suppress(sqlite3.Error):
            await self._connection.execute_fetchall("PRAGMA wal_checkpoint(TRUNCATE)")
        return await self._measured() >= size

    async def _measured(self) -> int:
        unused: int = await self._pragma("freelist_count")
        return unused * _PAGE + await asyncio.to_thread(self._left)

    def _left(self) -> int:
        """Return the bytes that can be written after the log; _UNKNOWN if the disk cannot be measured."""
        log = Path(f"{self._path}-wal")
        with suppress(OSError):
            return self._disk.free() - _SMALL - (log.stat().st_size if log.exists() else 0)
        return _UNKNOWN

    async def _empty_log(self) -> None:
        async with self._answering():
            with suppress(sqlite3.Error):
                await self._connection.execute_fetchall("PRAGMA wal_checkpoint(TRUNCATE)")

    async def _give_back(self) -> None:
        """Give deleted pages back to the disk, in steps: other processes use the database meanwhile."""
        steps, before = list(_GIVE_BACK), None
        while steps:
            async with self._answering():
                try:
                    unused = await self._pragma("freelist_count")
                    if not unused or unused == before:
                        return
                    # As a script: a statement without columns would free the first page only.
                    await self._connection.executescript(f"PRAGMA incremental_vacuum({steps[0]})")
                    await self._connection.execute_fetchall("PRAGMA wal_checkpoint(PASSIVE)")
                    before = unused
                except sqlite3.Error:
                    steps.pop(0)

    async def _failed(self, error: sqlite3.Error) -> ApiError:
        _log.error("store failed", store=self._path.name, reason=str(error))
        return disk_full() if await asyncio.to_thread(self._is_full, error) else _no_answer()

    def _is_full(self, error: sqlite3.Error) -> bool:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
            # SQLite's error where it cannot make the file that the processes share.
            with suppress(OSError):
                return self._disk.free() < _SMALL
        return code == sqlite3.SQLITE_FULL

    def _refused(self, error: sqlite3.Error) -> StartRefused:
        if self._is_full(error):
            place, name = self._path.parent, self._path.name
            return StartRefused(
                f"--state-dir: the disk of {place} is full: {name} cannot be opened ({error})"
            )
        if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_NOTADB:
            return StartRefused(f"--state-dir: {self._path} is no database: move it away ({error})")
        return StartRefused(f"--state-dir: {self._path} cannot be read and written ({error})")

    def _connect(self) -> aiosqlite.Connection:
        return aiosqlite.connect(self._path, timeout=_BUSY_S, isolation_level=None)

    async def _open(self) -> None:
        await asyncio.to_thread(_try_to_open, self._path)
        await self._connection
        try:
            # Lets deleted pages be given back. Has no effect after the first table.
            if await self._pragma("auto_vacuum") != _INCREMENTAL:
                await self._connection.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
            await self._connection.execute("PRAGMA journal_mode = WAL")
            await self._connection.execute("PRAGMA synchronous = NORMAL")
            pages = await asyncio.to_thread(self._log_pages)
            await self._connection.execute(f"PRAGMA wal_autocheckpoint = {pages}")
            await self._connection.execute(f"PRAGMA journal_size_limit = {2 * pages * _PAGE}")
            # Some builds write zeros over deleted data, for which a full disk has no room.
            await self._connection.execute("PRAGMA secure_delete = FAST")
            await self._connection.execute("PRAGMA foreign_keys = ON")
            await self._prepare()
        except (sqlite3.Error, StartRefused):
            await self._connection.close()
            raise

    def _log_pages(self) -> int:
        with suppress(OSError):
            if reserve := self._disk.reserve():
                return max(_FEWEST_LOG_PAGES, min(_LOG_PAGES, reserve // _PAGE // 2))
        return _LOG_PAGES

    async def _prepare(self) -> None:
        await self._connection.execute("BEGIN IMMEDIATE")
        found = await self._pragma("user_version")
        if found not in (0, self._version):
            raise StartRefused(f"--state-dir: {self._path} was made by another version; move it away")
        for statement in self._schema.split("\n\n"):
            await self._connection.execute(statement)
        if found != self._version:
            await self._connection.execute(f"PRAGMA user_version = {self._version}")
        await self._connection.commit()

    async def _pragma(self, name: str) -> Any:
        ((value,),) = await self._connection.execute_fetchall(f"PRAGMA {name}")
        return value


def disk_full() -> ApiError:
    """Return the error 507: the disk has no room."""
    message = "The server's disk is full: delete files or stored responses, or try again later."
    return ApiError(507, message, kind=SERVER_ERROR, code=_FULL_DISK)


def _no_answer() -> ApiError:
    return unavailable("The server's store does not answer.", code="store_unavailable")


def _try_to_open(path: Path) -> None:
    """Raise an error for what is no database; make its files readable for this user alone."""
    # SQLite gives the log and the shared memory file the mode of the database.
    with suppress(OSError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
            if name.exists() and name.stat().st_mode & 0o077:
                name.chmod(0o600)
    connection = sqlite3.connect(path, timeout=_BUSY_S)
    try:
        connection.execute("PRAGMA schema_version")
    finally:
        connection.close()


class Disk:
    """The disk of a state directory that several processes and databases share.

    A file reserves some room. On a full disk nothing could be deleted any more, and no database opened: both
    write a little first. Then the file is removed; it is made again once there is room."""

    def __init__(self, directory: Path, reserve_bytes: int = RESERVE_BYTES) -> None:
        """Prepare it. `reserve_bytes`: size of the file, which is smaller on a small disk; 0: no file."""
        self._directory = directory
        self._reserve = directory / _RESERVE
        self._bytes = reserve_bytes

    def free(self) -> int:
        """Return the bytes that this user may still write. Raise OSError."""
        status = os.statvfs(self._directory)
        return status.f_bavail * status.f_frsize

    def reserve(self) -> int:
        """Return the size of the reserve on this disk. Raise OSError."""
        status = os.statvfs(self._directory)
        return min(self._bytes, status.f_blocks * status.f_frsize // _PART_OF_DISK)

    def keep(self) -> None:
        """Make the reserve, unless it exists or would take most of the free room."""
        with suppress(OSError):
            size = self.reserve()
            if size <= 0 or (self._reserve.exists() and self._reserve.stat().st_size >= size):
                return
            if self.free() < 2 * size:
                return
            file = os.open(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.posix_fallocate(file, 0, size)
            finally:
                os.close(file)

    def give_up(self) -> None:
        """Remove the reserve, to make room for the next write."""
        with suppress(OSError):
            self._reserve.unlink()
