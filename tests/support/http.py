"""A plain HTTP/1.1 client on a raw connection: it shows every byte, and misbehaves as told."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Answer:
    """A whole response; `body` is what the chunks add up to."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The JSON of each server-sent event, the last one being [DONE] as text."""
        parts = self.body.decode().split("\n\n")
        assert parts.pop() == "", "the stream ends with a blank line"
        assert all(part.startswith("data: ") and "\n" not in part for part in parts)
        return [part[6:] if part == "data: [DONE]" else json.loads(part[6:]) for part in parts]


class Connection:
    """One connection to a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def to(cls, address: str, *, limit: int = 1 << 20) -> Connection:
        """Connect to a base URL."""
        parts = urlsplit(address)
        return cls(*await asyncio.open_connection(parts.hostname, parts.port, limit=limit))

    async def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Read status and headers."""
        raw = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = raw.strip().split("\r\n")
        pairs = (line.split(": ", 1) for line in lines)
        return int(first.split(" ")[1]), {name.lower(): value for name, value in pairs}

    async def chunk(self) -> bytes:
        """Read one chunk of a chunked body; empty at the end."""
        size = int((await self.reader.readuntil(b"\r\n")).strip(), 16)
        data = await self.reader.readexactly(size + 2)
        return data[:-2]

    async def answer(self, *, bodiless: bool = False) -> Answer:
        """Read a whole response. `bodiless`: it is to a HEAD request."""
        status, headers = await self.head()
        if bodiless:
            return Answer(status, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while chunk := await self.chunk():
                body += chunk
        else:
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return Answer(status, headers, body)

    def close(self) -> None:
        """Hang up."""
        self.writer.close()


def request_bytes(
    method: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    *,
    host: str = "localhost",
) -> bytes:
    """A request. A body that is not bytes is sent as JSON."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    fields = {"Host": host}
    if body is not None:
        fields |= {"Content-Type": "application/json", "Content-Length": str(len(data))}
    fields |= headers or {}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + data


async def call(
    address: str,
    method: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    *,
    timeout_s: float = 20,
) -> Answer:
    """One request on a connection of its own."""
    async with asyncio.timeout(timeout_s):
        connection = await Connection.to(address)
        try:
            await connection.send(request_bytes(method, path, body, headers))
            return await connection.answer(bodiless=method == "HEAD")
        finally:
            connection.close()
