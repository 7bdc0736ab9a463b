"""uvicorn's HTTP protocol with bounds on what a client may send before it is understood."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from catenary.telemetry import bind_request, get_logger
from gateway.errors import ApiError, bad_request, timed_out
from gateway.http.parts import WRITE_EXTENSION
from gateway.http.request_id import request_id_of
from gateway.http.respond import error_bytes
from gateway.http.unchunked import unchunked

_log = get_logger(__name__)

DROP_EXTENSION = "catenary.drop"
"""Key of `scope["extensions"]`: a callable that drops the connection with all that is unsent."""

MAX_DISCARDED_BYTES = 64 << 20
# A chunk of one byte takes six on the wire; whoever sends more around a body than this sends no body.
MAX_FRAMING_PER_BYTE = 8


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds per connection: bytes and fields of a request's head, seconds to send it, connections in all,
    and seconds in which a client must have read something of a finished answer."""

    max_header_bytes: int = 32 << 10
    max_headers: int = 128
    header_timeout_s: float = 20.0
    max_connections: int = 4096
    stall_s: float = 30.0


class LimitedHttpProtocol(HttpToolsProtocol):
    """Refuses over-long heads and trailers (431), heads that dribble in (408), what is no HTTP/1 (400).

    It does not pipeline: a request that comes while another is being answered ends the connection after
    that answer. So reading never has to pause for it, and a client that hangs up is noticed at once. A body
    that was refused and does not end is not read for ever, nor is a finished answer kept for ever for a
    client that does not read it."""

    limits = HttpLimits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0
        self._message_bytes = 0
        self._body_bytes = 0
        self._discarded = 0
        self._deaf = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._flush_timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        self.headers: list[tuple[bytes, bytes]] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            transport.abort()
            return
        self._arm_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm_head_timer()
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        while self._in_head and not self._deaf and data:
            room = self.limits.max_header_bytes - self._head_bytes
            piece, data = data[: room + 1], data[room + 1 :]
            self._head_bytes += len(piece)
            super().data_received(piece)
            if self.transport.is_closing():
                return
            if self._in_head and self._head_bytes > self.limits.max_header_bytes:
                self._refuse_head()
                return
        if self._deaf:
            self._discard(len(data))
        elif data:
            self._message_bytes += len(data)
            super().data_received(data)
            self._check_framing()

    def on_message_begin(self) -> None:
        if self._running is not None and not self._running.response_complete:
            self._deaf = True
            self._running.keep_alive = False
            return
        super().on_message_begin()
        self.scope["extensions"] = {DROP_EXTENSION: {"call": self._drop}}
        if self._head_timer is None:
            self._arm_head_timer()

    def on_url(self, url: bytes) -> None:
        if not self._deaf:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._deaf or self.transport.is_closing():
            return
        super().on_header(name, value)
        if len(self.headers) > self.limits.max_headers:
            self._refuse(_too_large(f"The request has more than {self.limits.max_headers} header fields."))

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = self._message_bytes = self._body_bytes = self._discarded = 0
        self._disarm_head_timer()
        if self._deaf or self.transport.is_closing():
            return
        if (problem := _framing_problem(self.parser.get_http_version(), self.headers)) is not None:
            self._refuse(problem)
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._deaf or self.transport.is_closing():
            return
        self._body_bytes += len(body)
        if self.cycle.response_complete:
            self._discard(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._deaf and not self.transport.is_closing():
            super().on_message_complete()
        self._in_head = True
        self._head_bytes = 0
        # What is refused from here on is another request: it must not get this one's id.
        self.headers = []

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_flush()

    def send_400_response(self, msg: str) -> None:
        """The base class's answer to what its parser refused."""
        if not self.transport.is_closing():
            self._refuse(
                bad_request("The server could not read this as an HTTP request.", code="invalid_http")
            )

    def _unsupported_upgrade_warning(self) -> None:
        """Offers to upgrade are declined in silence, as HTTP allows."""

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        cycle.scope["extensions"][WRITE_EXTENSION] = {"call": partial(self._write_part, cycle)}
        if cycle.scope["http_version"] == "1.0":
            cycle.waiting_for_100_continue = False
            app = unchunked(cycle, app)
        super()._start_asgi_task(cycle, app)

    def _write_part(self, cycle: RequestResponseCycle, part: bytes) -> bool:
        if not cycle.chunked_encoding or cycle.disconnected or cycle.response_complete:
            return False
        if self.flow.write_paused or not part:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
        return True

    def _check_framing(self) -> None:
        framing = self._message_bytes - self._body_bytes
        allowed = self.limits.max_header_bytes + MAX_FRAMING_PER_BYTE * self._body_bytes
        if not self._in_head and framing > allowed and not self.transport.is_closing():
            self._refuse_head()

    def _discard(self, count: int) -> None:
        self._discarded += count
        if self._discarded > MAX_DISCARDED_BYTES:
            self.transport.abort()

    def _refuse_head(self) -> None:
        limit = self.limits.max_header_bytes >> 10
        self._refuse(_too_large(f"The request's head or trailer is larger than the limit of {limit} KiB."))

    def _refuse(self, error: ApiError) -> None:
        request_id = request_id_of(Headers(raw=self.headers))
        with bind_request(request_id, None):
            _log.info("request refused", status=error.status, code=error.code)
        running = self._running
        if running is None or running.response_complete or not running.response_started:
            # Otherwise a second answer would be read as part of the one under way.
            self.transport.write(error_bytes(error, request_id))
        self.transport.close()
        self._end_running()

    def _drop(self) -> None:
        self.transport.abort()
        self._end_running()

    def _end_running(self) -> None:
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()

    def _watch_flush(self, unsent_before: int | None = None) -> None:
        unsent = self.transport.get_write_buffer_size()
        if unsent_before is not None and unsent >= unsent_before:
            self.transport.abort()
        elif unsent:
            if self._flush_timer is not None:
                self._flush_timer.cancel()
            self._flush_timer = self.loop.call_later(self.limits.stall_s, self._watch_flush, unsent)

    def _arm_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.header_timeout_s, self._head_late)

    def _disarm_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        self._head_timer = None
        if self._in_head and not self.transport.is_closing():
            limit = self.limits.header_timeout_s
            self._refuse(timed_out(f"The request's head took longer than {limit:g} seconds.", status=408))


def _framing_problem(version: str, headers: list[tuple[bytes, bytes]]) -> ApiError | None:
    """Why the body of a request that could be parsed cannot be told; None if it can."""
    if version not in ("1.0", "1.1"):
        return bad_request("The server speaks HTTP/1.1.", code="invalid_http")
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if codings not in ([], [b"chunked"]):
        return bad_request(
            "The only Transfer-Encoding that is supported is chunked.", code="unsupported_transfer_encoding"
        )
    return None


def _too_large(message: str) -> ApiError:
    return ApiError(431, message, code="headers_too_large")


def limited_protocol(limits: HttpLimits) -> type[LimitedHttpProtocol]:
    """The protocol class with these limits; uvicorn makes one instance per connection."""
    return type("BoundHttpProtocol", (LimitedHttpProtocol,), {"limits": limits})
