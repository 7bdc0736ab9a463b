"""Calling the API from within: the same code that answers a client, without a connection."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Scope

from catenary.telemetry import bind_request, get_logger, new_id, start_span
from gateway.auth import identify
from gateway.caller import Caller, calling
from gateway.errors import internal
from gateway.ignored import ignored_header
from gateway.limits.allowance import COUNTED, Tried

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class InnerAnswer:
    """An answer. `retry_after_s` None: the server did not say when to come back. `headers`: those that a
    batch tells of it."""

    status: int
    request_id: str
    body: bytes
    retry_after_s: float | None
    headers: dict[str, str]


async def call_inside(
    app: ASGIApp, path: str, body: dict[str, Any], *, owner: str, cache_salt: str, tried: Tried
) -> InnerAnswer:
    """POST to `app`. Cancelling it ends the request as a client that hangs up does.

    Args:
        app: the routes, without what checks keys and connections in front of them, but behind the limits.
        path: the route.
        body: the JSON body.
        owner: whose request it is.
        cache_salt: of the owner's cached KV.
        tried: the same one whenever the request is tried.
    """
    data = msgspec.json.encode(body)
    request_id = new_id("req-")
    answer = _Answer()
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))],
        "client": None,
        "server": None,
        COUNTED: tried,
    }
    identify(scope, owner=owner, cache_salt=cache_salt)
    span = start_span(f"batch {path}", None)
    with bind_request(request_id, span.traceparent):
        try:
            with calling(Caller(owner=owner, bulk=True)):
                await app(scope, _Receive(data), answer)
        except Exception:
            # The framework answers with a 500 and raises the defect again.
            _log.exception("request of a batch failed")
            answer.status = answer.status or internal().status
            answer.body = answer.body or bytearray(internal().body())
        finally:
            span.end({"http.response.status_code": answer.status, "catenary.request_id": request_id})
    told = {name.decode(): value.decode() for name, value in ignored_header(scope)}
    return InnerAnswer(answer.status, request_id, bytes(answer.body), answer.retry_after_s, told)


class _Receive:
    """The body, and then nothing for as long as the request lasts."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._read = False

    async def __call__(self) -> Message:
        if self._read:
            await asyncio.Event().wait()
        self._read = True
        return {"type": "http.request", "body": self._data, "more_body": False}


class _Answer:
    """Takes what is sent."""

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()
        self.retry_after_s: float | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self.body += message.get("body", b"")
            return
        self.status = message["status"]
        for name, value in message.get("headers", ()):
            if name == b"retry-after-ms":
                self.retry_after_s = int(value) / 1000
