"""Server-sent events as bytes, encoded once per event."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.errors import ApiError

SSE_DONE = b"data: [DONE]\n\n"
SSE_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies of the nginx family hold events back unless told not to.
    (b"x-accel-buffering", b"no"),
)

_encoder = msgspec.json.Encoder()
# Older clients cut lines at these characters too.
_LINE_BREAKS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))


def json_line(payload: Any) -> bytes:
    """JSON on one line for every reader."""
    data = _encoder.encode(payload)
    if not data.isascii():
        for character, escape in _LINE_BREAKS:
            data = data.replace(character, escape)
    return data


def sse_event(payload: Any) -> bytes:
    """`data: {json}` and a blank line, on one line for every reader."""
    return b"data: " + json_line(payload) + b"\n\n"


def sse_error_event(error: ApiError) -> bytes:
    """An error inside a stream: `error` and no `choices`."""
    return sse_event(error.envelope())
