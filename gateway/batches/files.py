"""Stored files, and uploads, which are stored piece by piece while they arrive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import aiosqlite
import msgspec
from msgspec import UNSET, UnsetType
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from catenary.nearest import near
from gateway.batches.objects import FileObject, Purpose
from gateway.errors import ApiError, bad_request, timed_out
from gateway.http.request import ClientGone
from gateway.state.database import Database

_COLUMNS = "id, purpose, filename, bytes, created, expires"
_IN_USE = (
    "SELECT 1 FROM batches WHERE input = ? AND status NOT IN ('failed', 'completed', 'expired', 'cancelled')"
)


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Most files, and most bytes of all files together."""

    max_files: int
    max_bytes: int


class FileStore:
    """Files by id, each for its owner alone.

    All methods raise ApiError: 503 if the store does not answer, 507 if the disk is full."""

    def __init__(
        self, database: Database, limits: FileLimits, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._database = database
        self._limits = limits
        self._clock = clock

    async def begin(self, owner: str, file_id: str, size: int = 0) -> None:
        """Make a file of about `size` bytes (0: unknown), which is neither listed nor read before `finish`.

        Raise ApiError: 400 if there are too many files, 507 if the disk has no room for it."""
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
        """Add piece `number` to a file. Raise ApiError: 400 if all files together are too large, 507."""
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
        """Make a complete file visible; return it."""
        expires = None if expires_s is None else self._clock() + expires_s
        async with self._database.transaction() as db:
            await db.execute(
                "UPDATE files SET filename = ?, expires = ?, ready = 1 WHERE id = ?",
                (filename, expires, file_id),
            )
        return await self.get(owner, file_id)

    async def discard(self, file_id: str) -> None:
        """Delete an incomplete file."""
        await self._database.essential(
            lambda db: db.execute_fetchall("DELETE FROM files WHERE id = ? AND ready = 0", (file_id,))
        )

    async def get(self, owner: str, file_id: str) -> FileObject:
        rows = await self._database.fetch(
            f"SELECT {_COLUMNS} FROM files WHERE id = ? AND owner = ? AND ready = 1", (file_id, owner)
        )
        if not rows:
            raise file_not_found()
        return _file(rows[0])

    async def listed(
        self, owner: str, *, purpose: str | None, limit: int, after: str | None, newest_first: bool
    ) -> list[FileObject]:
        """Return up to `limit` files that follow `after`. Raise ApiError 400 if that is no file."""
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
        """Yield a file's pieces in order; they are read a few at a time."""
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
        """Delete a file. Raise ApiError: 404, or 409 while a batch reads it."""

        async def delete(db: aiosqlite.Connection) -> None:
            cursor = await db.execute(
                "DELETE FROM files WHERE id = ? AND owner = ? AND ready = 1", (file_id, owner)
            )
            if cursor.rowcount != 1:
                raise file_not_found()
            # After the check of the owner: others get 404. The error rolls the delete back.
            if await db.execute_fetchall(_IN_USE, (file_id,)):
                raise ApiError(409, "A batch that has not ended reads this file.", code="file_in_use")

        await self._database.essential(delete)

    async def sweep(self, upload_s: float) -> None:
        """Delete expired files, and incomplete uploads that are older than `upload_s`."""
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
    """Return the error 404: no such file, or another owner's."""
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


PIECE_BYTES = 256 << 10
# Of the form around a file; for the file itself there are options.
_MAX_VALUE_BYTES = 1024
_MAX_HEADER_BYTES = 4096
_MAX_PARTS = 16
_MAX_FILENAME = 512
_FIELDS = frozenset({"purpose", "expires_after[anchor]", "expires_after[seconds]"})
_NAMES = {"anchor": "expires_after[anchor]", "seconds": "expires_after[seconds]"}


class UploadForm(msgspec.Struct, rename=_NAMES):
    """Fields of the form with which a file is uploaded."""

    file: Annotated[str, msgspec.Meta(extra_json_schema={"format": "binary"})]
    purpose: Literal["batch"]
    anchor: Literal["created_at"] | UnsetType = UNSET
    seconds: int | UnsetType = UNSET


Write = Callable[[int, bytes], Awaitable[None]]
"""Writer of the piece with a number."""


@dataclass(slots=True)
class Upload:
    """The form fields of an upload, and the size of its file in bytes."""

    filename: str = ""
    size: int = 0
    fields: dict[str, str] = field(default_factory=dict)


async def read_upload(request: Request, write: Write, *, max_bytes: int, timeout_s: float) -> Upload:
    """Read a whole form with one file. Raise ApiError (400, 408, 413, 415) or ClientGone.

    Args:
        request: the request, whose body was not read.
        write: stores the file's pieces.
        max_bytes: of the file.
        timeout_s: seconds until all of it must have arrived.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise ApiError(415, "Content-Type must be multipart/form-data.", code="unsupported_content_type")
    # The rest of the form is small.
    most = max_bytes + _MAX_PARTS * (8 * _MAX_HEADER_BYTES + _MAX_VALUE_BYTES)
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:20]) > most:
        raise _too_large(max_bytes)
    form = _Form(boundary, max_bytes)
    pieces = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for data in _body(request):
                form.feed(data)
                while len(form.content) >= PIECE_BYTES:
                    await write(pieces, bytes(form.content[:PIECE_BYTES]))
                    del form.content[:PIECE_BYTES]
                    pieces += 1
    except TimeoutError:
        raise timed_out(f"The upload did not arrive within {timeout_s:g} seconds.", status=408) from None
    upload = form.finish()
    if form.content:
        await write(pieces, bytes(form.content))
    return upload


def declared_bytes(request: Request, most: int) -> int:
    """Return about the bytes of a file; 0 if its request declares none, or more than `most`."""
    length = request.headers.get("content-length", "0")
    declared = int(length[:20]) if length.isdecimal() else 0
    return declared if declared <= most else 0


async def _body(request: Request) -> AsyncIterator[bytes]:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        if data := message.get("body", b""):
            yield data
        if not message.get("more_body", False):
            return


class _Form:
    """Callbacks of the parser. `content`: bytes of the file that were read and not stored yet."""

    def __init__(self, boundary: bytes, max_bytes: int) -> None:
        self.content = bytearray()
        self._max_bytes = max_bytes
        self._upload = Upload()
        self._files = 0
        self._parts = 0
        self._name: bytearray = bytearray()
        self._value: bytearray = bytearray()
        self._disposition = b""
        self._field = ""
        self._in_file = False
        self._text = bytearray()
        self._complete = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._part_begin,
                    "on_part_data": self._part_data,
                    "on_part_end": self._part_end,
                    "on_header_field": self._header_field,
                    "on_header_value": self._header_value,
                    "on_header_end": self._header_end,
                    "on_headers_finished": self._headers_finished,
                    "on_end": self._end,
                },
                max_header_size=_MAX_HEADER_BYTES,
            )
        except FormParserError:
            raise _broken() from None

    def feed(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except FormParserError:
            raise _broken() from None

    def finish(self) -> Upload:
        """Return the form, whose body has ended. Raise ApiError if it is incomplete."""
        if not self._complete:
            raise _broken()
        if not self._files:
            raise bad_request("Missing required parameter: 'file'.", "file", "missing_required_parameter")
        return self._upload

    def _part_begin(self) -> None:
        self._parts += 1
        self._disposition = b""
        self._text = bytearray()
        if self._parts > _MAX_PARTS:
            raise bad_request(f"The form has more than {_MAX_PARTS} parts.")

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if bytes(self._name).lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._name, self._value = bytearray(), bytearray()

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._field = options.get(b"name", b"").decode("utf-8", "replace")
        self._in_file = self._field == "file"
        if self._in_file:
            self._files += 1
            name = options.get(b"filename", b"").decode("utf-8", "replace")
            # A name, never a path; it is shown and nothing else.
            self._upload.filename = name.replace("\\", "/").rsplit("/", 1)[-1][:_MAX_FILENAME] or "upload"
            if self._files > 1:
                raise bad_request("The form has more than one file.", "file")
        elif self._field not in _FIELDS:
            hint = near(self._field, ("file", *_FIELDS))
            raise bad_request(f"Unknown parameter in the form{hint}.", None, "unknown_parameter")

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self._upload.size += end - start
            if self._upload.size > self._max_bytes:
                raise _too_large(self._max_bytes)
            self.content += data[start:end]
            return
        self._text += data[start:end]
        if len(self._text) > _MAX_VALUE_BYTES:
            raise bad_request(f"Invalid '{self._field}': too long.", self._field)

    def _part_end(self) -> None:
        if not self._in_file:
            if self._field in self._upload.fields:
                raise bad_request(f"Invalid '{self._field}': given twice.", self._field)
            self._upload.fields[self._field] = self._text.decode("utf-8", "replace")

    def _end(self) -> None:
        self._complete = True


def _broken() -> ApiError:
    return bad_request("The request body is not a valid form.", code="invalid_form")


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"The file is larger than the limit of {max_bytes / (1 << 20):.3g} MiB.",
        code="request_too_large",
    )
