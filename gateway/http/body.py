"""Reading a JSON body: strict, bounded in size and in time, long work cut into turns of the event loop."""

from __future__ import annotations

import asyncio
import gc
import time
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request

from gateway.errors import ApiError, bad_request, timed_out
from gateway.http.disconnect import ClientGone

TURN_S = 0.002
"""Seconds after which work lets others have the loop."""


class Turns:
    """The turns of one piece of work, whose author awaits `between` after each short step."""

    def __init__(self) -> None:
        self._until = time.perf_counter() + TURN_S

    async def between(self) -> None:
        """Let the loop go round once if this turn has lasted long enough."""
        if time.perf_counter() < self._until:
            return
        await asyncio.sleep(0)
        self._until = time.perf_counter() + TURN_S


_MIB = 1 << 20
_BOM = b"\xef\xbb\xbf"
_SLICE = 32 << 10
# Numbers cost little: prompts of token ids may have many.
NUMBERS = 10
"""Times as many values of all kinds as strings, arrays and objects (--max-body-values) a body may have. No
option of its own: it is how much less a number costs to parse."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Largest body in bytes, most strings, arrays and objects in it, and seconds in which it must have
    arrived."""

    max_bytes: int
    max_values: int
    timeout_s: float


async def read_json_object(request: Request, limits: BodyLimits) -> dict[str, Any]:
    """The body as a JSON object.

    Strict JSON: UTF-8, no NaN or Infinity, no number beyond a double, no lone surrogates, nesting bounded
    by the parser. A byte order mark in front of it is skipped. Raises ApiError, or ClientGone if the client
    hung up."""
    _check_headers(request, limits)
    data = await _read(request, limits)
    if data.startswith(_BOM):
        del data[: len(_BOM)]
    if await too_many_values(data, limits.max_values):
        raise bad_request(
            f"The request body has more than the limit of {limits.max_values} strings, arrays and objects, "
            f"or of {NUMBERS * limits.max_values} values in all.",
            code="invalid_json",
        )
    try:
        value = decode_json(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise bad_request("The request body is not valid JSON.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("The request body must be a JSON object.", code="invalid_json")
    return value


async def too_many_values(data: bytes | bytearray, most: int) -> bool:
    """Whether JSON has more than `most` strings, arrays and objects, or `NUMBERS` times as many values of all
    kinds. Names of fields are strings, too.

    Each costs the parser, which holds up the loop, many times as much as a number or as the bytes of a long
    string. So this looks at the text first, in turns. JSON that is broken has any answer."""
    # Each of them takes two bytes at least.
    if len(data) < 2 * most:
        return False
    turns, found, commas, inside, start = Turns(), 0, 0, False, 0
    while start < len(data) and found <= most and commas < NUMBERS * most:
        piece = bytes(data[start : start + _SLICE])
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            # What its last backslash escapes belongs to it.
            piece = bytes(data[start : start + _SLICE + 1])
        start += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[inside::2])
        begun = len(parts) // 2 if not inside else (len(parts) - 1) // 2
        found += begun + outside.count(b"[") + outside.count(b"{")
        commas += outside.count(b",")
        inside ^= len(parts) % 2 == 0
        await turns.between()
    return found > most or commas >= NUMBERS * most


def decode_json(data: bytes | bytearray) -> Any:
    """The value of a JSON text. Raises msgspec.MsgspecError, ValueError or RecursionError."""
    # A hundred thousand empty arrays would set off the garbage collector more than a hundred times.
    gc.disable()
    try:
        return msgspec.json.decode(data)
    finally:
        gc.enable()


def _check_headers(request: Request, limits: BodyLimits) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "Content-Type must be application/json.", code="unsupported_content_type")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", ""):
        raise ApiError(
            415, "Compressed request bodies are not supported.", code="unsupported_content_encoding"
        )
    length = request.headers.get("content-length")
    if length is not None and (not length.isdecimal() or int(length[:20]) > limits.max_bytes):
        raise _too_large(limits)


async def _read(request: Request, limits: BodyLimits) -> bytearray:
    data = bytearray()
    try:
        async with asyncio.timeout(limits.timeout_s):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                data += message.get("body", b"")
                if len(data) > limits.max_bytes:
                    raise _too_large(limits)
                if not message.get("more_body", False):
                    return data
    except TimeoutError:
        raise timed_out(
            f"The request body did not arrive within {limits.timeout_s:g} seconds.", status=408
        ) from None


def _too_large(limits: BodyLimits) -> ApiError:
    return ApiError(
        413,
        f"The request body is larger than the limit of {limits.max_bytes / _MIB:.3g} MiB.",
        code="request_too_large",
    )
