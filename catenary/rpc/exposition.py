"""Serve the /metrics page of a process that speaks no HTTP otherwise."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

# A scraper is one connection with a head of some hundred bytes: these keep others from holding memory.
MAX_CONNECTIONS = 16
REQUEST_BYTES = 8192
REQUEST_SECONDS = 5.0


class MetricsServer:
    """Answers `GET /metrics` on a port of its own, on the process's own loop, one request per connection.

    Scrapers that are slow or too many are cut off: at most 16 connections, 8 KiB and 5 seconds for a request.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._idle = asyncio.Event()

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the real port. Raises OSError when the address cannot be bound."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=REQUEST_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Close the port and the connections."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for writer in self._open:
            writer.transport.abort()
        while self._open:
            self._idle.clear()
            await self._idle.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            if len(self._open) > MAX_CONNECTIONS:
                return
            with suppress(TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(REQUEST_SECONDS):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._answer(head))
                    await writer.drain()
        finally:
            writer.close()
            self._open.discard(writer)
            self._idle.set()

    def _answer(self, head: bytes) -> bytes:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or words[0] not in (b"GET", b"HEAD"):
            status, kind, body = "405 Method Not Allowed", "text/plain", b"GET only\n"
        elif words[1].split(b"?", 1)[0] != b"/metrics":
            status, kind, body = "404 Not Found", "text/plain", b"try /metrics\n"
        else:
            encode, kind = choose_encoder(_accept(head))
            status, body = "200 OK", encode(self._registry)
        header = (
            f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        ).encode()
        return header if words[0] == b"HEAD" else header + body


def _accept(head: bytes) -> str:
    """Return the media types that a scraper takes."""
    found = []
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"accept":
            found.append(value.decode("latin-1").strip())
    return ",".join(found)
