"""Outermost layer: request ids, checks that concern every request, logging, the last catch."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from catenary.telemetry import Span, bind_request, get_logger, request_id, start_span, unrecorded
from gateway.errors import ApiError, bad_request, internal
from gateway.http.answers import REQUEST_ID, Fields, request_id_of, send_error
from gateway.http.protocol import DROP_EXTENSION
from gateway.http.request import ClientGone, SlowReader
from gateway.schemas.ignored import ignored_header

_log = get_logger(__name__)
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER = "other"
CLIENT_GONE = 499
"""Status that is counted for a request whose client hung up before it had one."""

Observer = Callable[[str, str, int, float], None]
"""Receiver of route template, method, status and seconds of each request; the first two from closed sets."""


class RequestContext:
    """ASGI middleware. A well-formed `x-request-id` of the client is echoed, any other is replaced by our
    own.

    The ids that the system uses inside are always its own."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        allowed_hosts: Sequence[str] | None,
        observe: Observer,
        stall_s: float,
        answer_fields: Callable[[Headers], Fields] = lambda _: (),
        probed: Collection[str] = (),
        unlogged: Collection[str] = (),
    ) -> None:
        """Wrap `app`.

        Args:
            app: the application.
            allowed_hosts: names that are answered; None: localhost and IP addresses; with "*": any.
            observe: called when a request is over.
            stall_s: seconds that a client may leave its answer unread before it is dropped.
            answer_fields: headers that are added to an answer, by its request's.
            probed: paths that are answered under any host name, since probes go by address.
            unlogged: paths without log lines and spans.
        """
        self._app = app
        self._answer_fields = answer_fields
        self._observe = observe
        self._probed = frozenset(probed)
        self._unlogged = frozenset(unlogged)
        self._stall_s = stall_s
        self._names = None if allowed_hosts is None else frozenset(name.lower() for name in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        own_id = request_id_of(headers)
        started = time.perf_counter()
        fields = ((REQUEST_ID.encode(), own_id.encode()), *self._answer_fields(headers))
        answer = _Answer(scope, send, fields, self._stall_s)
        parent = headers.get("traceparent")
        hidden = scope["path"] in self._unlogged
        span = unrecorded(parent) if hidden else start_span("request", parent, server=True)
        with bind_request(own_id, span.traceparent):
            try:
                if (refusal := self._refusal(scope, headers)) is not None:
                    await send_error(answer, refusal)
                else:
                    await self._app(scope, receive, answer)
            except ClientGone:
                pass
            except Exception:
                _log.exception("request failed")
                if not answer.status:
                    with suppress(ClientGone):
                        await send_error(answer, internal())
                elif not answer.complete:
                    # The server then cuts the connection: the client must see that its answer is not whole.
                    raise
            finally:
                answer.close()
                self._finish(scope, answer.status or CLIENT_GONE, time.perf_counter() - started, span)

    def _refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        hosts = headers.getlist("host")
        if not hosts and scope["http_version"] != "1.0":
            return bad_request("The request has no Host header.", code="invalid_host")
        if len(hosts) > 1 or (hosts and not (match := _HOST.fullmatch(hosts[0]))):
            return bad_request("The Host header is not valid.", code="invalid_host")
        name = match[1].lower() if hosts and match else ""
        if scope["path"] not in self._probed and not self._host_allowed(name):
            return ApiError(
                403,
                "This server does not answer under that host name; see its option allowed-hosts.",
                kind="permission_error",
                code="host_not_allowed",
            )
        return None

    def _host_allowed(self, name: str) -> bool:
        if self._names is not None:
            return "*" in self._names or name in self._names
        if name in ("", "localhost") or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True

    def _finish(self, scope: Scope, status: int, seconds: float, span: Span) -> None:
        route = getattr(scope.get("route"), "path", OTHER)
        method = scope["method"] if scope["method"] in _METHODS else OTHER
        self._observe(route, method, status, seconds)
        # Probes and scrapes come every few seconds and are of no interest.
        level = logging.DEBUG if route in self._unlogged else logging.INFO
        _log.log(level, "request", method=method, route=route, status=status, seconds=round(seconds, 4))
        span.end(
            {
                "http.request.method": method,
                "http.route": route,
                "http.response.status_code": status,
                "catenary.request_id": request_id() or "",
            },
            name=f"{method} {route}",
            error=str(status) if status >= 500 else None,
        )


class _Answer:
    """`send` of a request, which adds headers, and drops a client that leaves its answer unread."""

    def __init__(self, scope: Scope, send: Send, fields: Fields, stall_s: float) -> None:
        self._scope = scope
        self._send = send
        self._fields = fields
        self._stall_s = stall_s
        self._dropped = False
        self._loop = asyncio.get_running_loop()
        # When the write that has not ended began. One timer looks at it now and then: a timer for each write
        # would cost a good part of a chunk.
        self._began: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.status = 0
        """Status of the answer; 0 before the head was sent."""
        self.complete = False

    async def __call__(self, message: Message) -> None:
        if self._dropped:
            raise SlowReader
        if message["type"] == "http.response.start":
            own = message.get("headers", ())
            # An answer to what a browser asks before it calls has those of CORS.
            names = {name for name, _ in own if name.startswith(b"access-control-")}
            added = [field for field in self._fields if not names or not field[0].startswith(b"access-")]
            message["headers"] = [*own, *added, *ignored_header(self._scope)]
        self._began = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._stall_s, self._look)
        await self._send(message)
        self._began = None
        if self._dropped:
            raise SlowReader
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.complete = not message.get("more_body", False)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        if self._began is None:
            return
        left = self._began + self._stall_s - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
            return
        _log.warning("client does not read", seconds=self._stall_s)
        self._dropped = True
        # This ends the write.
        if (drop := self._scope.get("extensions", {}).get(DROP_EXTENSION)) is not None:
            drop["call"]()
