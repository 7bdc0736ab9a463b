"""Stored files."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiosqlite

from gateway.batches.objects import FileObject, Purpose
from gateway.errors import ApiError, bad_request
from gateway.state.database import Database

_COLUMNS = "id, purpose, filename, bytes, created, expires"
_IN_USE = (
    "SELECT 1 FROM batches WHERE input = ? AND status NOT IN ('failed', 'completed', 'expired', 'cancelled')"
)


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Files in all, and their bytes in all."""

    max_files: int
    max_bytes: int


class FileStore:
    """Files by id, each for its owner alone. All methods raise ApiError: 503 if the store does not answer,
    507 if the disk is full."""

    def __init__(
        self, database: Database, limits: FileLimits, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._database = database
        self._limits = limits
        self._clock = clock

    async def begin(self, owner: str, file_id: str, size: int = 0) -> None:
        """Make a file that is not listed or read before `finish`, of about `size` bytes (0: not known).

        Raises ApiError: 400 if there are too many files, 507 if the disk has no room for it."""
        await self._database.check_room(size)
        async with self._database.transaction() as db:
            await db.execute(
                "INSERT INTO files (id, owner, purpose, filename, created) VALUES (?, ?, ?, '', ?)",
                (file_id, owner, Purpose.BATCH.value, self._clock()),
            )
            ((files, _),) = await db.execute_fetchall("SELECT files, bytes FROM totals")
            if files > self._limits.max_files:
                raise bad_request(
                    f"The server keeps at most {self._limits.max_files} files; delete some.",
                    None,
                    "storage_full",
                )

    async def append(self, file_id: str, number: int, data: bytes) -> None:
        """Add the piece `number` to a file. Raises ApiError: 400 if files are too large in all, 507."""
        async with self._database.transaction(len(data)) as db:
            await db.execute("INSERT INTO pieces VALUES (?, ?, ?)", (file_id, number, data))
            await db.execute("UPDATE files SET bytes = bytes + ? WHERE id = ?", (len(data), file_id))
            ((_, size),) = await db.execute_fetchall("SELECT files, bytes FROM totals")
            if size > self._limits.max_bytes:
                raise bad_request(
                    f"The server keeps at most {self._limits.max_bytes >> 20} MiB of files; delete some.",
                    None,
                    "storage_full",
                )

    async def finish(self, owner: str, file_id: str, filename: str, expires_s: float | None) -> FileObject:
        """Show a file that is complete."""
        expires = None if expires_s is None else self._clock() + expires_s
        async with self._database.transaction() as db:
            await db.execute(
                "UPDATE files SET filename = ?, expires = ?, ready = 1 WHERE id = ?",
                (filename, expires, file_id),
            )
        return await self.get(owner, file_id)

    async def discard(self, file_id: str) -> None:
        """Forget a file that did not become complete."""
        await self._database.essential(
            lambda db: db.execute_fetchall("DELETE FROM files WHERE id = ? AND ready = 0", (file_id,))
        )

    async def get(self, owner: str, file_id: str) -> FileObject:
        """A file. Raises ApiError 404."""
        rows = await self._database.fetch(
            f"SELECT {_COLUMNS} FROM files WHERE id = ? AND owner = ? AND ready = 1", (file_id, owner)
        )
        if not rows:
            raise file_not_found()
        return _file(rows[0])

    async def listed(
        self, owner: str, *, purpose: str | None, limit: int, after: str | None, newest_first: bool
    ) -> list[FileObject]:
        """Up to `limit` files behind the file `after`. Raises ApiError 400 if that is none."""
        sign, order = ("<", "DESC") if newest_first else (">", "ASC")
        where, values = "owner = ? AND ready = 1", [owner]
        if purpose is not None:
            where, values = f"{where} AND purpose = ?", [*values, purpose]
        if after is not None:
            anchor = await self._database.fetch(
                "SELECT created, id FROM files WHERE id = ? AND owner = ?", (after, owner)
            )
            if not anchor:
                raise bad_request("Invalid 'after': there is no file of that id.", "after")
            where, values = f"{where} AND (created, id) {sign} (?, ?)", [*values, *anchor[0]]
        rows = await self._database.fetch(
            f"SELECT {_COLUMNS} FROM files WHERE {where} ORDER BY created {order}, id {order} LIMIT ?",
            (*values, limit),
        )
        return [_file(row) for row in rows]

    async def content(self, file_id: str) -> AsyncIterator[bytes]:
        """A file's pieces in order, a few at a time."""
        number = -1
        while True:
            rows = await self._database.fetch(
                "SELECT number, data FROM pieces WHERE file = ? AND number > ? ORDER BY number LIMIT 16",
                (file_id, number),
            )
            if not rows:
                return
            number = rows[-1][0]
            for _, data in rows:
                yield data

    async def delete(self, owner: str, file_id: str) -> None:
        """Forget a file. Raises ApiError: 404, or 409 while a batch reads it."""

        async def delete(db: aiosqlite.Connection) -> None:
            cursor = await db.execute(
                "DELETE FROM files WHERE id = ? AND owner = ? AND ready = 1", (file_id, owner)
            )
            if cursor.rowcount != 1:
                raise file_not_found()
            # Behind the check of the owner: to others the file is not there. Raising takes it back.
            if await db.execute_fetchall(_IN_USE, (file_id,)):
                raise ApiError(409, "A batch that has not ended reads this file.", code="file_in_use")

        await self._database.essential(delete)

    async def sweep(self, upload_s: float) -> None:
        """Forget files that have expired, and uploads that were broken off: none takes `upload_s`."""
        now = self._clock()

        async def delete(db: aiosqlite.Connection) -> None:
            unused = f"NOT EXISTS ({_IN_USE.replace('?', 'files.id')})"
            await db.execute(f"DELETE FROM files WHERE ready = 1 AND expires < ? AND {unused}", (now,))
            await db.execute(
                "DELETE FROM files WHERE ready = 0 AND purpose = ? AND created < ?",
                (Purpose.BATCH.value, now - upload_s),
            )

        await self._database.essential(delete)


def file_not_found() -> ApiError:
    """404: no such file, or not the caller's."""
    return ApiError(404, "No such file is stored.", code="file_not_found", param="file_id")


def _file(row: tuple[Any, ...]) -> FileObject:
    file_id, purpose, filename, size, created, expires = row
    return FileObject(
        id=file_id,
        bytes=size,
        created_at=int(created),
        expires_at=None if expires is None else int(expires),
        filename=filename,
        purpose=Purpose(purpose),
    )
