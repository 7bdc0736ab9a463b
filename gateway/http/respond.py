"""Answers written straight to ASGI, for code below the framework."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import ApiError
from gateway.http.disconnect import ClientGone


async def send_error(send: Send, error: ApiError) -> None:
    """Write an error as the whole answer."""
    body = error.body()
    headers = [*error.headers(), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


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
        # Nobody is there to be told, and the framework would answer an exception with a 500.
        with suppress(ClientGone):
            await self._work(scope, receive, send)
