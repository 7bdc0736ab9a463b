"""Reading a JSON body: strict, bounded in size and in time."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request

from gateway.errors import ApiError, bad_request, timed_out
from gateway.http.disconnect import ClientGone

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Largest body in bytes, and seconds in which it must have arrived."""

    max_bytes: int
    timeout_s: float


async def read_json_object(request: Request, limits: BodyLimits) -> dict[str, Any]:
    """The body as a JSON object.

    Strict JSON: UTF-8, no NaN or Infinity, no number beyond a double, no lone surrogates, nesting bounded
    by the parser. Raises ApiError, or ClientGone if the client hung up."""
    _check_headers(request, limits)
    data = await _read(request, limits)
    try:
        value = _decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise bad_request("The request body is not valid JSON.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("The request body must be a JSON object.", code="invalid_json")
    return value


def _decode(data: bytearray) -> Any:
    # A body of a million empty arrays would set off the garbage collector hundreds of times.
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
