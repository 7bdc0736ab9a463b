"""The two ways to answer: an event stream, or one object."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from catenary.telemetry import get_logger
from gateway.errors import ApiError, internal
from gateway.generation.delta import ChoiceDelta, ChoiceResult
from gateway.generation.generation import Generation
from gateway.http.disconnect import ClientGone
from gateway.http.protocol import ABORT_EXTENSION
from gateway.streaming.sequence_text import LogprobEntry
from gateway.streaming.sse import DONE, HEADERS, error_event
from gateway.streaming.usage import Usage

_log = get_logger(__name__)


class Writer(Protocol):
    """How a route's answers are written."""

    def opening(self, count: int, usage: Usage | None) -> bytes:
        """Events in front of all text."""
        ...

    def delta(self, delta: ChoiceDelta, usage: Usage | None) -> bytes:
        """Events for a delta."""
        ...

    def usage(self, usage: Usage) -> bytes:
        """The usage event."""
        ...

    def whole(self, results: Sequence[ChoiceResult], usage: Usage) -> bytes:
        """The answer in one object."""
        ...


async def collect(generation: Generation, first: list[ChoiceDelta]) -> list[ChoiceResult]:
    """All choices, whole. `first`: what `next` has returned already."""
    count = generation.plan.count
    texts: list[list[str]] = [[] for _ in range(count)]
    entries: list[list[LogprobEntry]] = [[] for _ in range(count)]
    deltas = first
    while True:
        for delta in deltas:
            texts[delta.index].append(delta.text)
            entries[delta.index] += delta.entries
        if generation.done:
            break
        deltas = await generation.next()
    wanted = generation.plan.top_count is not None
    return [
        ChoiceResult(
            index, "".join(texts[index]), tuple(entries[index]) if wanted else None, reason or "stop"
        )
        for index, reason in enumerate(generation.finish_reasons)
    ]


class EventStream:
    """The deltas of a generation as server-sent events.

    It is sent once the engine has answered for the first time, so that whatever can be refused has been. An
    error after that is an event, followed by [DONE]."""

    def __init__(
        self,
        generation: Generation,
        writer: Writer,
        first: list[ChoiceDelta],
        *,
        stall_s: float,
        on_error: Callable[[str], None],
    ) -> None:
        """Args:
        stall_s: seconds after which a client that does not read is dropped.
        on_error: called with the reason of a failure that the response could only tell in its stream.
        """
        self._generation = generation
        self._writer = writer
        self._first = first
        self._stall_s = stall_s
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._put(send, {"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
            try:
                await self._events(send)
            except ApiError as error:
                self._on_error(error.code or "")
                await self._body(send, error_event(error) + DONE)
            except (ClientGone, _Stalled):
                raise
            except Exception:
                _log.exception("stream failed")
                self._on_error("internal_error")
                await self._body(send, error_event(internal()) + DONE)
            await self._put(send, {"type": "http.response.body", "body": b"", "more_body": False})
        except _Stalled:
            self._on_error("slow_reader")
            _log.warning("client does not read", seconds=self._stall_s)
            await _drop_connection(scope)
            raise ClientGone from None

    async def _events(self, send: Send) -> None:
        generation, writer, fields = self._generation, self._writer, self._generation.plan.fields
        running = generation.usage if fields.wants_running_usage else lambda: None
        data = writer.opening(generation.plan.count, running())
        deltas = self._first
        while True:
            data += b"".join(writer.delta(delta, running()) for delta in deltas)
            if generation.done:
                break
            if data:
                await self._body(send, data)
            deltas, data = await generation.next(), b""
        if fields.wants_usage:
            data += writer.usage(generation.usage())
        await self._body(send, data + DONE)

    async def _body(self, send: Send, data: bytes) -> None:
        await self._put(send, {"type": "http.response.body", "body": data, "more_body": True})

    async def _put(self, send: Send, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await send(message)
        except TimeoutError:
            raise _Stalled from None


class _Stalled(Exception):
    """The client left its stream unread for too long."""


async def _drop_connection(scope: Scope) -> None:
    extension = scope.get("extensions", {}).get(ABORT_EXTENSION)
    if extension is not None:
        extension["call"]()
        # The server must have seen the end of the connection before the response ends without its last chunk.
        await asyncio.sleep(0.01)
