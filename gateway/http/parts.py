"""The parts of a streamed answer, on the short way to its connection."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.types import Scope, Send

WRITE_EXTENSION = "catenary.write"
"""Key of `scope["extensions"]`: writes a part of an answer that goes out in chunks, at once, and returns
whether it did. It does not while the client reads too slowly, nor once it is gone: `send` knows what to do
then."""

PartSender = Callable[[bytes], Awaitable[None]]
"""Sends the next bytes of an answer whose head was sent."""


def part_sender(scope: Scope, send: Send) -> PartSender:
    """Sends parts past all that stands between an answer and its connection: that concerns the head alone."""
    write: Callable[[bytes], bool] | None = scope.get("extensions", {}).get(WRITE_EXTENSION, {}).get("call")

    async def send_part(part: bytes) -> None:
        if write is None or not write(part):
            await send({"type": "http.response.body", "body": part, "more_body": True})

    return send_part
