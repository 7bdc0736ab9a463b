"""A client that reads event streams at a few microseconds a chunk, on connections that it keeps."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

_END = b"\n0\r\n\r\n"
_EVENT = b"data: "


@dataclass(frozen=True, slots=True)
class Times:
    """Of one request, in seconds of `time.perf_counter`; `chunks` counts events, [DONE] among them.

    What is read in one turn of the loop was there when the turn began, and counts as read then: as by clients
    on machines of their own, which would not wait for one another."""

    asked: float
    first: float
    last: float
    chunks: int


def request_of(path: str, body: dict[str, Any]) -> bytes:
    """Return the bytes of a POST on a connection that is kept."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data


class TurnClock:
    """When the loop's turn began in which connections are read."""

    def __init__(self) -> None:
        self._began: float | None = None

    def now(self) -> float:
        """Return the time of the turn's first reading."""
        if self._began is None:
            self._began = time.perf_counter()
            # Runs once everything was read that this turn found to read.
            asyncio.get_running_loop().call_soon(self._end)
        return self._began

    def _end(self) -> None:
        self._began = None


_clock = TurnClock()


class SseConnection(asyncio.Protocol):
    """One connection, one stream at a time. `on_chunks` is told how many events came."""

    def __init__(self, on_chunks: Callable[[int], None] | None = None) -> None:
        self._on_chunks = on_chunks
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Times] | None = None
        self._asked = self._first = 0.0
        self._chunks = 0
        self._tail = b""

    @classmethod
    async def to(cls, address: str, on_chunks: Callable[[int], None] | None = None) -> SseConnection:
        """Connect to a base URL."""
        parts = urlsplit(address)
        loop = asyncio.get_running_loop()
        host, port = parts.hostname or "", parts.port or 80
        _, protocol = await loop.create_connection(lambda: cls(on_chunks), host, port)
        return protocol

    async def ask(self, request: bytes) -> Times:
        """Send a request, whose answer is a stream, and read that to its end. Raises RuntimeError for another
        answer."""
        if self._transport is None:
            raise RuntimeError("not connected")
        self._answer = asyncio.get_running_loop().create_future()
        self._first, self._chunks, self._tail = 0.0, 0, b""
        self._asked = time.perf_counter()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        # uvloop's is none by its class.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(RuntimeError("the connection broke"))

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._answer is None or self._answer.done():
            return
        now = _clock.now()
        if not self._first:
            if _EVENT not in data:
                if not data.startswith(b"HTTP/1.1 200 "):
                    self._answer.set_exception(RuntimeError(data.decode(errors="replace")[:300]))
                return
            self._first = now
        # An event begins with `data: `, which JSON on one line cannot hold but in a string; none here does.
        whole = self._tail + data
        count = whole.count(_EVENT)
        self._chunks += count
        if self._on_chunks is not None and count:
            self._on_chunks(count)
        # Too short for an event that was counted, long enough for one or an end that was cut in two.
        self._tail = whole[-5:]
        if whole.endswith(_END):
            self._answer.set_result(Times(self._asked, self._first, now, self._chunks))
