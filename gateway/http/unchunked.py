"""Answers to HTTP/1.0, which knows no chunks."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def unchunked(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """`app`, whose answers of unknown length are ended by the end of the connection.

    uvicorn frames what has no length in chunks, whatever the request's version, and holds what it must not
    frame against a length. So each part of such an answer is announced as all that is left.
    """

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
