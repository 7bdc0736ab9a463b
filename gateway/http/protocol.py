"""uvicorn's HTTP protocol with bounds on unparsed input."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import httptools
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from catenary.telemetry import bind_request, get_logger
from gateway.errors import ApiError, bad_request, timed_out
from gateway.http.answers import WRITE_EXTENSION, Fields, error_bytes, request_id_of
from gateway.http.closing import HalfClosedClients, LingeringTransport, Room, closed_unless_asked

_log = get_logger(__name__)


DROP_EXTENSION = "catenary.drop"
"""Key of `scope["extensions"]`: a callable that drops the connection and its unsent data."""

# A chunk of one byte takes six on the wire. More framing than this per byte of body is an attack.
MAX_FRAMING_PER_BYTE = 8
# Of what follows a refused head or framing, which is hardly the body of a request: at most so many times
# --max-header-kib is read and dropped, and never more than --max-discarded-mib.
_REFUSED_HEADS = 256
_TURNED_AWAY_S = 1.0
_AUTHORITY_END = re.compile(rb"[/?#]")


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds per connection.

    Fields:
        max_header_bytes: of a request's head, and of a trailer.
        max_headers: fields of a head, and of a trailer.
        header_timeout_s: seconds to send a head.
        max_connections: open connections in all.
        stall_s: seconds in which a client must have read something of a finished answer.
        linger_s: seconds for which a connection that is closed takes what its client still sends, so that
            the client gets to read the answer; 0: none.
        max_discarded_bytes: bytes that are taken, and dropped, of a request that is refused.
    """

    max_header_bytes: int = 32 << 10
    max_headers: int = 128
    header_timeout_s: float = 20.0
    max_connections: int = 4096
    stall_s: float = 30.0
    linger_s: float = 10.0
    max_discarded_bytes: int = 64 << 20


class LimitedHttpProtocol(HttpToolsProtocol):
    """Protocol that refuses over-long heads and trailers (431), slow heads (408), and input that is not
    HTTP/1 (400).

    There is no pipelining: a request that arrives while another is being answered ends the connection after
    that answer. So reading never has to pause for it, and a disconnect is noticed at once. A refused body
    that does not end is not read for ever, nor is a finished answer kept for ever for a client that does not
    read it. Offers to upgrade to another protocol are declined: the request is answered as HTTP/1.1, with its
    body."""

    limits = HttpLimits()
    room = Room(limits.max_connections)
    half_closed = HalfClosedClients()
    leaving = False
    """Whether each connection ends with its next answer, since the server is about to stop."""
    refusal_fields: Callable[[Headers], Fields] | None = None
    """Further headers of an answer that is sent before the application sees the request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        # From a request's first byte to its last.
        self._in_message = False
        # The head of a request that offers to upgrade, without the offer.
        self._declined: bytes | None = None
        self._trailers = 0
        self._refused = False
        self._turned_away = False
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
        self._lingering = LingeringTransport(transport, self._may_send_more, self.limits.linger_s)
        super().connection_made(self._lingering)
        kept = transport.get_extra_info("socket")
        descriptor = 0 if kept is None else kept.fileno()
        refusal = self.room.refusal(len(self.connections), descriptor)
        if refusal is None:
            self._arm_head_timer()
        elif self.room.can_tell(descriptor):
            self.room.turned_away += 1
            self._turned_away = True
            self._lingering.linger_s = min(self.limits.linger_s, _TURNED_AWAY_S)
            self._refuse(refusal)
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm_head_timer()
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        self.half_closed.discard(self.transport)
        if self._turned_away:
            self._turned_away = False
            self.room.turned_away -= 1
        self._lingering.lost()
        super().connection_lost(exc)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Note the end of the client's data. Return whether the connection stays open: only for a client that
        has sent a whole request whose answer has not begun; any other counts as gone."""
        running = self._running
        waits = running is not None and not running.response_started and not self._in_message
        if running is None or not waits or self.transport.is_closing() or self.scheme == "https":
            return None
        running.keep_alive = False
        self.half_closed.add(self.transport, running)
        return True

    def leave(self) -> None:
        """End the connection with the next answer whose head is still to be sent and can announce it.

        One whose head is sent ends nothing: its client was not told, and its next request would meet a closed
        connection."""
        if self._running is not None and not self._running.response_started:
            self._running.keep_alive = False

    def close(self) -> None:
        """End the connection: at once, or with the answer in progress."""
        if self._in_message or (self._running is not None and not self._running.response_complete):
            if self._running is not None:
                self._running.keep_alive = False
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self._lingering.lingering:
            self._discard(len(data))
            return
        while self._in_head and not self._deaf and data:
            room = self.limits.max_header_bytes - self._head_bytes
            piece, data = data[: room + 1], data[room + 1 :]
            self._head_bytes += len(piece)
            self._feed(piece)
            if self.transport.is_closing():
                return
            if self._in_head and self._head_bytes > self.limits.max_header_bytes:
                self._refuse_head()
                return
        if self._deaf:
            self._discard(len(data))
        elif data:
            self._message_bytes += len(data)
            self._feed(data)
            self._check_framing()

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if self._declined is not None:
                self._decline(data[offer.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("")

    def _decline(self, rest: bytes) -> None:
        """Read a request again from its head, without its offer to upgrade.

        The parser takes all that follows such a head for another protocol's. A new one gets the head without
        the offer, and so frames the body by its own rules."""
        head, self._declined = self._declined or b"", None
        self.parser = httptools.HttpRequestParser(self)
        # As for the first: what follows a request with `Connection: close` is skipped, not an error.
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._feed(head)
        if rest and not self.transport.is_closing():
            self._feed(rest)

    def on_message_begin(self) -> None:
        if self._running is not None and not self._running.response_complete:
            self._deaf = True
            self._running.keep_alive = False
            return
        self._unset_keepalive_if_required()
        self._in_message = True
        self._trailers = 0
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
        if self._in_head:
            super().on_header(name, value)
        else:
            # A field of a trailer must not pass for one of the head.
            self._trailers += 1
        if max(len(self.headers), self._trailers) > self.limits.max_headers:
            self._refuse(_too_large(f"The request has more than {self.limits.max_headers} header fields."))

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and not self._deaf and not self.transport.is_closing():
            method = self.parser.get_method()
            if method == b"CONNECT":
                self._refuse(bad_request("The server is no proxy: it has no CONNECT.", code="invalid_http"))
            else:
                version = self.parser.get_http_version().encode()
                self._declined = _head_of(method, self.url, version, self.headers)
            return
        self._in_head = False
        self._head_bytes = self._message_bytes = self._body_bytes = self._discarded = 0
        self._disarm_head_timer()
        if self._deaf or self.transport.is_closing():
            return
        problem = _framing_problem(self.parser.get_http_version(), self.headers)
        if problem is None and not self.url.startswith(b"/"):
            problem = self._take_absolute()
        if problem is not None:
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

    def _take_absolute(self) -> ApiError | None:
        """Reduce a request's URL to a path. Return the error that refuses it, or None."""
        scheme, found, rest = self.url.partition(b"://")
        if not found:
            return None
        if scheme.lower() not in (b"http", b"https"):
            return bad_request("The request's URL is not one of HTTP.", code="invalid_http")
        authority = _AUTHORITY_END.split(rest, maxsplit=1)[0]
        if authority.lower() not in [value.lower() for name, value in self.headers if name == b"host"]:
            return bad_request("The request's URL and its Host header differ.", code="invalid_host")
        path = rest[len(authority) :]
        self.url = path if path.startswith(b"/") else b"/" + path
        return None

    def on_message_complete(self) -> None:
        if self._declined is not None:
            return
        self._in_message = False
        if not self._deaf and not self.transport.is_closing():
            super().on_message_complete()
        self._in_head = True
        self._head_bytes = 0
        # From here on another request may be refused: it must not get this one's id.
        self.headers = []

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_flush()

    def send_400_response(self, msg: str) -> None:
        if self.transport.is_closing() or self._deaf:
            return
        running = self._running
        if running is not None and not running.response_complete and not self._in_message:
            # It came behind a whole request, which gets its answer.
            self._deaf = True
            running.keep_alive = False
            return
        self._refuse(bad_request("The server could not read this as an HTTP request.", code="invalid_http"))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if self.leaving:
            cycle.keep_alive = False
        cycle.scope["extensions"][WRITE_EXTENSION] = {"call": partial(self._write_part, cycle)}
        if cycle.scope["http_version"] == "1.0":
            cycle.waiting_for_100_continue = False
            app = unchunked(cycle, app)
        if cycle.waiting_for_100_continue:
            app = closed_unless_asked(cycle, app)
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

    def _may_send_more(self) -> bool:
        return self._in_message or self._deaf or self._refused

    def _discard(self, count: int) -> None:
        self._discarded += count
        most = self.limits.max_discarded_bytes
        if self._refused:
            most = min(most, self.limits.max_header_bytes * _REFUSED_HEADS)
        if self._discarded > most:
            self.transport.abort()

    def _refuse_head(self) -> None:
        limit = self.limits.max_header_bytes >> 10
        self._refuse(_too_large(f"The request's head or trailer is larger than the limit of {limit} KiB."))

    def _refuse(self, error: ApiError) -> None:
        headers = Headers(raw=self.headers)
        request_id = request_id_of(headers)
        with bind_request(request_id, None):
            _log.info("request refused", status=error.status, code=error.code)
        running = self._running
        if running is None or running.response_complete or not running.response_started:
            # Otherwise a second answer would be read as part of the one under way.
            fields = () if self.refusal_fields is None else self.refusal_fields(headers)
            self.transport.write(error_bytes(error, request_id, fields))
        self._refused = True
        self.transport.close()
        self._watch_flush()
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
    """Return the error for a request whose head is valid but whose body has no clear framing, else None."""
    if version not in ("1.0", "1.1"):
        return bad_request("The server speaks HTTP/1.1.", code="invalid_http")
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and version == "1.0":
        return bad_request("HTTP/1.0 has no Transfer-Encoding.", code="unsupported_transfer_encoding")
    if codings not in ([], [b"chunked"]):
        return bad_request(
            "The only Transfer-Encoding that is supported is chunked.", code="unsupported_transfer_encoding"
        )
    return None


def _too_large(message: str) -> ApiError:
    return ApiError(431, message, code="headers_too_large")


def _head_of(method: bytes, url: bytes, version: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Encode a head that was read, without its offer to upgrade."""
    fields = b"".join(b"%b: %b\r\n" % field for field in headers if field[0] != b"upgrade")
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, url, version, fields)


def limited_protocol(
    limits: HttpLimits, refusal_fields: Callable[[Headers], Fields] | None = None
) -> type[LimitedHttpProtocol]:
    """Return the protocol class of one server, which makes one instance per connection.

    `refusal_fields`: further headers, by a request's, of an answer that is sent before the application sees
    the request."""
    made = {
        "limits": limits,
        "room": Room(limits.max_connections),
        "half_closed": HalfClosedClients(),
        "refusal_fields": None if refusal_fields is None else staticmethod(refusal_fields),
    }
    return type("BoundHttpProtocol", (LimitedHttpProtocol,), made)


def unchunked(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """Wrap `app` so that answers of unknown length are ended by the end of the connection.

    uvicorn frames an answer without a length in chunks, whatever the request's version, and checks other
    answers against their length. So each part of such an answer is announced as the whole rest."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = True

        async def send_plain(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return answer
