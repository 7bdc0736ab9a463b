"""Requests as they are read: JSON body, strict and bounded, query, and whether the client is still there."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Receive

from catenary.nearest import near
from gateway.errors import ApiError, bad_request, timed_out

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection and waits for no answer."""


class SlowReader(ClientGone):
    """The client left its answer unread for too long, and its connection was dropped."""


class ClientWatch:
    """Watch of a request's connection from entry to exit."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._callbacks: list[Callable[[], None]] = []
        self._start: asyncio.Handle | None = None
        self._task: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def start(self) -> None:
        """Begin to watch, after the next step of this task: the client waits for that."""
        self._start = asyncio.get_running_loop().call_soon(self._begin)

    async def close(self) -> None:
        self._callbacks.clear()
        if self._start is not None:
            self._start.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def on_gone(self, callback: Callable[[], None]) -> None:
        """Call back when the client hangs up (at once if it has)."""
        if self._gone.is_set():
            callback()
        else:
            self._callbacks.append(callback)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`; cancel it and raise ClientGone if the client hangs up first."""
        stop = _Stop(asyncio.current_task())
        self.on_gone(stop)
        try:
            return await work
        except asyncio.CancelledError:
            if stop.alone():
                raise ClientGone from None
            raise
        finally:
            if stop in self._callbacks:
                self._callbacks.remove(stop)

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue
        self._gone.set()
        for callback in self._callbacks:
            callback()


class _Stop:
    """Cancel of a task, made at most once."""

    def __init__(self, task: asyncio.Task[Any] | None) -> None:
        self._task = task
        self._called = False

    def __call__(self) -> None:
        if self._task is not None:
            self._called = self._task.cancel()

    def alone(self) -> bool:
        """Take the cancel back. Return whether it was the only one of the task."""
        return self._called and self._task is not None and not self._task.uncancel()


TURN_S = 0.002
"""Seconds after which work yields the loop to other tasks."""


class Turns:
    """Turns of one piece of work, which awaits `between` after each short step."""

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
"""Most values of any kind in a body, as a multiple of --max-body-values, which limits strings, arrays and
objects. Not an option: a number costs that much less to parse."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Largest body in bytes, most strings, arrays and objects in it, and seconds in which it must have
    arrived."""

    max_bytes: int
    max_values: int
    timeout_s: float


async def read_json_object(request: Request, limits: BodyLimits) -> dict[str, Any]:
    """Return the body as a JSON object.

    Strict JSON: UTF-8, no NaN or Infinity, no number beyond a double, no lone surrogates, nesting bounded by
    the parser. A byte order mark in front of it is skipped. Raises ApiError, or ClientGone if the client hung
    up."""
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
    """Return whether JSON has more than `most` strings (names of fields too), arrays and objects, or
    `NUMBERS` times as many values of any kind.

    Each costs the parser, which blocks the loop, many times as much as a number or as the bytes of a long
    string: so the text is scanned first, in turns. Broken JSON may return either."""
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
    """Return the value of a JSON text. Raises msgspec.MsgspecError, ValueError or RecursionError."""
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


# Characters of a value: an id, a number or a word of a closed set.
_MAX_LENGTH = 512


class Parameter(Protocol):
    """A parameter that a route understands."""

    @property
    def name(self) -> str:
        """Name in the query."""

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of its values."""


@dataclass(frozen=True, slots=True)
class Text:
    """Parameter that takes any text; `meaning` describes it."""

    name: str
    meaning: str

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "string", "description": self.meaning, "maxLength": _MAX_LENGTH}

    def of(self, query: Mapping[str, str]) -> str | None:
        return query.get(self.name)


@dataclass(frozen=True, slots=True)
class Integer:
    """Integer from `least` to `most`. `default`: its value when left out, which the schema shows unless it is
    `optional`."""

    name: str
    default: int
    least: int
    most: int
    optional: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        default = {} if self.optional else {"default": self.default}
        return {"type": "integer", "minimum": self.least, "maximum": self.most, **default}

    def of(self, query: Mapping[str, str]) -> int:
        """Return the value. Raises ApiError 400."""
        text = query.get(self.name)
        if text is None:
            return self.default
        if not (
            text.isascii() and text.isdecimal() and len(text) <= 9 and self.least <= int(text) <= self.most
        ):
            raise bad_request(
                f"Invalid '{self.name}': must be an integer from {self.least} to {self.most}.", self.name
            )
        return int(text)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of `values`; if it is left out the first, or nothing if it is `optional`."""

    name: str
    values: Sequence[str]
    optional: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        default = {} if self.optional else {"default": self.values[0]}
        return {"type": "string", "enum": list(self.values), **default}

    def of(self, query: Mapping[str, str]) -> str:
        """Return the value. Raises ApiError 400."""
        text = query.get(self.name, self.values[0])
        if text not in self.values:
            raise bad_request(f"Invalid '{self.name}': must be one of {', '.join(self.values)}.", self.name)
        return text


def query_of(
    request: Request, known: Sequence[Parameter], unsupported: Sequence[str] = ()
) -> Mapping[str, str]:
    """Return the parameters of a URL, each at most once. Raises ApiError 400.

    Args:
        request: the request.
        known: supported parameters.
        unsupported: names with an error of their own, other than for unknown ones.
    """
    names = {parameter.name for parameter in known}
    found: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        name = name.removesuffix("[]")
        if name in unsupported:
            raise bad_request(
                f"The parameter '{name}' is not supported by this server yet.", name, "unsupported_parameter"
            )
        if name not in names:
            raise bad_request(f"Unknown parameter in the URL{near(name, names)}.", None, "unknown_parameter")
        if name in found or len(value) > _MAX_LENGTH:
            raise bad_request(f"Invalid '{name}': given twice, or too long.", name)
        found[name] = value
    return found
