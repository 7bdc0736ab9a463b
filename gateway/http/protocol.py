"""uvicorn's HTTP protocol with bounds on what a client may send before it is understood."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.errors import ApiError

ABORT_EXTENSION = "catenary.abort"
"""Key of `scope["extensions"]`: a callable that drops the connection with all that is unsent."""

MAX_DISCARDED_BYTES = 64 << 20
_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds per connection: bytes and fields of a request's head, seconds to send it, connections in all."""

    max_header_bytes: int = 32 << 10
    max_headers: int = 128
    header_timeout_s: float = 20.0
    max_connections: int = 4096


class LimitedHttpProtocol(HttpToolsProtocol):
    """Refuses over-long heads (431), heads that dribble in (408) and what is no HTTP (400), in the API's
    envelope.

    It also tells every request of a connection that the client hung up, not only the one that came last,
    and stops reading a refused body that does not end."""

    limits = HttpLimits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0
        self._discarded = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            transport.abort()
            return
        self._arm_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm_head_timer()
        cycles = [cycle for cycle, _ in self.pipeline]
        if self._running is not None:
            cycles.append(self._running)
        super().connection_lost(exc)
        for cycle in cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        while self._in_head and data:
            room = self.limits.max_header_bytes - self._head_bytes
            piece, data = data[: room + 1], data[room + 1 :]
            self._head_bytes += len(piece)
            super().data_received(piece)
            if self.transport.is_closing():
                return
            if self._in_head and self._head_bytes > self.limits.max_header_bytes:
                limit = self.limits.max_header_bytes >> 10
                self._refuse(431, f"The request's head is larger than the limit of {limit} KiB.")
                return
        if data:
            super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT_EXTENSION: {"call": self.transport.abort}}
        if self._head_timer is None:
            self._arm_head_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > self.limits.max_headers and not self.transport.is_closing():
            self._refuse(
                431, f"The request has more header fields than the limit of {self.limits.max_headers}."
            )

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        self._discarded = 0
        self._disarm_head_timer()
        if not self.transport.is_closing():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self.transport.is_closing():
            return
        if self.cycle.response_complete:
            self._discarded += len(body)
            if self._discarded > MAX_DISCARDED_BYTES:
                self.transport.abort()
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.transport.is_closing():
            super().on_message_complete()
        self._in_head = True
        self._head_bytes = 0

    def send_400_response(self, msg: str) -> None:
        """The base class's answer to what its parser refused."""
        if not self.transport.is_closing():
            self._refuse(400, "The server could not read this as an HTTP request.")

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _refuse(self, status: int, message: str) -> None:
        body = ApiError(status, message, code="invalid_http" if status == 400 else None).body()
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\nconnection: close\r\n" % (
            status,
            _REASONS[status],
        )
        if self._running is None or self._running.response_complete:
            # Otherwise an answer is on its way and a second one behind it would be read as part of it.
            self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()

    def _arm_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.header_timeout_s, self._head_late)

    def _disarm_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        self._head_timer = None
        if self._in_head and not self.transport.is_closing():
            self._refuse(
                408, f"The request's head took longer than {self.limits.header_timeout_s:g} seconds."
            )


def limited_protocol(limits: HttpLimits) -> type[LimitedHttpProtocol]:
    """The protocol class with these limits; uvicorn makes one instance per connection."""
    return type("BoundHttpProtocol", (LimitedHttpProtocol,), {"limits": limits})
