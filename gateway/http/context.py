"""The outermost layer: request ids, checks that concern every request, logging, the last catch."""

from __future__ import annotations

import ipaddress
import logging
import re
import time
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from catenary.telemetry import bind_request, child_traceparent, get_logger, is_request_id, new_id
from gateway.errors import ApiError, bad_request, internal
from gateway.http.respond import send_error

_log = get_logger(__name__)
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_PROBES = frozenset({"/live", "/health", "/ready", "/metrics"})
OTHER = "other"
CLIENT_GONE = 499
"""Counted as the status of a request whose client hung up before there was one."""

Observer = Callable[[str, str, int, float], None]
"""Called once per request with route template, method, status and seconds; the first two are of closed
sets.
"""


class RequestContext:
    """ASGI middleware. A sane `x-request-id` of the client is echoed, any other is replaced by our own; ids
    that the system uses inside are always its own.
    """

    def __init__(self, app: ASGIApp, *, allowed_hosts: Sequence[str] | None, observe: Observer) -> None:
        """`allowed_hosts` None: localhost and IP addresses; a list with "*": any."""
        self._app = app
        self._observe = observe
        self._names = None if allowed_hosts is None else frozenset(name.lower() for name in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not is_request_id(request_id):
            request_id = new_id("req-")
        started = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        with bind_request(request_id, child_traceparent(headers.get("traceparent"))):
            try:
                if (refusal := self._refusal(headers)) is not None:
                    await send_error(send_with_id, refusal)
                else:
                    await self._app(scope, receive, send_with_id)
            except Exception:
                _log.exception("request failed")
                if not status:
                    await send_error(send_with_id, internal())
                else:
                    raise
            finally:
                self._finish(scope, status or CLIENT_GONE, time.perf_counter() - started)

    def _refusal(self, headers: Headers) -> ApiError | None:
        hosts = headers.getlist("host")
        if len(hosts) > 1 or (hosts and not (match := _HOST.fullmatch(hosts[0]))):
            return bad_request("The Host header is not valid.", code="invalid_host")
        name = match[1].lower() if hosts and match else ""
        if not self._host_allowed(name):
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

    def _finish(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", OTHER)
        method = scope["method"] if scope["method"] in _METHODS else OTHER
        self._observe(route, method, status, seconds)
        # Probes and scrapes come every few seconds and say nothing.
        level = logging.DEBUG if route in _PROBES else logging.INFO
        _log.log(level, "request", method=method, route=route, status=status, seconds=round(seconds, 4))
