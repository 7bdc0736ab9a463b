"""Answers: objects that several routes share, errors, parts of a stream."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Generic, Protocol, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from catenary.telemetry import is_request_id, new_id
from gateway.errors import ApiError

T = TypeVar("T")


class Named(Protocol):
    """An object of a list."""

    id: str


N = TypeVar("N", bound=Named)


class Page(msgspec.Struct, Generic[T]):
    """A part of a list; the ids are those of its first and its last object."""

    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class Deleted(msgspec.Struct):
    """An object is no more."""

    id: str
    object: str
    deleted: bool = True


class Status(msgspec.Struct):
    """How the gateway is: ok, unavailable or draining."""

    status: str


class Version(msgspec.Struct):
    """The version of the software."""

    version: str


def page_of(found: Sequence[N], limit: int) -> Page[N]:
    """Return the first `limit` of the objects that were found."""
    shown = list(found[:limit])
    first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
    return Page(shown, first, last, len(found) > limit)


def json_response(value: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


Fields = Sequence[tuple[bytes, bytes]]


async def send_error(send: Send, error: ApiError) -> None:
    body = error.body()
    headers = [*error.headers(), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def error_bytes(error: ApiError, request_id: str, further: Fields = ()) -> bytes:
    """Encode an error with its HTTP head, for a connection on which nothing follows."""
    body = error.body()
    fields = [
        *error.headers(),
        (REQUEST_ID.encode(), request_id.encode()),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
        *further,
    ]
    head = b"HTTP/1.1 %d %s\r\n" % (error.status, HTTPStatus(error.status).phrase.encode())
    return head + b"".join(b"%s: %s\r\n" % field for field in fields) + b"\r\n" + body


def error_response(error: ApiError) -> Response:
    """Return the same as a Starlette response."""
    response = Response(error.body(), status_code=error.status)
    for name, value in error.headers():
        response.headers[name.decode()] = value.decode()
    return response


async def send_json(send: Send, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@dataclass(frozen=True, slots=True)
class Call:
    """HTTP request and the means to answer it, as ASGI passes them to an application."""

    scope: Scope
    receive: Receive
    send: Send


REQUEST_ID = "x-request-id"


def request_id_of(headers: Headers) -> str:
    """Return the client's own id if it is well-formed, else a new one."""
    sent = headers.get(REQUEST_ID, "")
    return sent if is_request_id(sent) else new_id("req-")


WRITE_EXTENSION = "catenary.write"
"""Key of `scope["extensions"]`: writes a part of an answer that goes out in chunks, at once, and returns
whether it did. It does not while the client reads too slowly, nor once it is gone: then `send` takes over."""

PartSender = Callable[[bytes], Awaitable[None]]
"""Sender of the next bytes of an answer whose head was sent."""


def part_sender(scope: Scope, send: Send) -> PartSender:
    """Return a sender of parts that bypasses the middlewares, which concern the head alone."""
    write: Callable[[bytes], bool] | None = scope.get("extensions", {}).get(WRITE_EXTENSION, {}).get("call")

    async def send_part(part: bytes) -> None:
        if write is None or not write(part):
            await send({"type": "http.response.body", "body": part, "more_body": True})

    return send_part
