"""Answers for code below the framework: written straight to ASGI, or as bytes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from http import HTTPStatus

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import ApiError
from gateway.http.disconnect import ClientGone
from gateway.http.request_id import REQUEST_ID

Fields = Sequence[tuple[bytes, bytes]]
"""Headers of an answer."""


async def send_error(send: Send, error: ApiError) -> None:
    """Write an error as the whole answer."""
    body = error.body()
    headers = [*error.headers(), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def error_bytes(error: ApiError, request_id: str, further: Fields = ()) -> bytes:
    """An error as it goes over the wire, for a connection on which nothing follows."""
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
    """The same as a Starlette response."""
    response = Response(error.body(), status_code=error.status)
    for name, value in error.headers():
        response.headers[name.decode()] = value.decode()
    return response


async def send_json(send: Send, body: bytes) -> None:
    """Write a JSON object as the whole answer."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Deferred(Response):
    """A response that does the whole work of its request: one scope holds all that must be released."""

    def __init__(self, work: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The client is gone, and the framework would answer an exception with a 500.
        with suppress(ClientGone):
            await self._work(scope, receive, send)
