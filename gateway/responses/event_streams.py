"""Telling of background responses: the events of their streams, from any of them on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from starlette.types import Receive, Send

from gateway.errors import ApiError, bad_request, overloaded, unavailable
from gateway.http.disconnect import ClientWatch
from gateway.responses.event_log import EventLog, EventLogs
from gateway.responses.events import Error, encode_event
from gateway.responses.library import not_found
from gateway.responses.store import ResponseStore, StoredEvents
from gateway.streaming.sse import SSE_HEADERS

_TICK_S = 0.3
_MIB = 1 << 20


class EventStreams:
    """Sends streams of stored events. A response may be made here, at another gateway, or be final."""

    def __init__(self, store: ResponseStore, logs: EventLogs, max_streams: int) -> None:
        """`logs`: of the responses that are made here; `max_streams`: at a time."""
        self._store = store
        self._logs = logs
        self._max_streams = max_streams
        self._open = 0
        self._cut = False

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place among the streams, which `send` needs. Raises ApiError 429."""
        if self._open >= self._max_streams:
            raise overloaded(
                f"The server is sending its limit of {self._max_streams} streams of background responses."
            )
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    def cut_off(self) -> None:
        """End what is sent with an error, within a tick: the server stops."""
        self._cut = True

    async def send(self, owner: str, response_id: str, after: int, receive: Receive, send: Send) -> None:
        """Answer with all events behind the one with the sequence number `after` (-1: all), those that are
        still to come included. The stream ends with the response, whatever has ended it.

        Raises ApiError before the answer has begun, ClientGone at any time."""
        found = self._told(await self._store.events(owner, response_id, after))
        await send({"type": "http.response.start", "status": 200, "headers": list(SSE_HEADERS)})
        try:
            async with ClientWatch(receive) as watch:
                while not (found.final and not found.events):
                    log = self._logs.get(response_id)
                    changed = None if log is None else log.changed
                    if found.events:
                        await _send_part(send, found.events)
                        after += len(found.events)
                    elif self._cut:
                        raise unavailable("The server is shutting down.")
                    found = await self._next(owner, response_id, after, log)
                    if not found.events and not found.final:
                        await watch.run(_wait(changed))
        except ApiError as error:
            if error.status != 404:
                event = Error(after + 1, error.code, error.message, error.param)
                await _send_part(send, [encode_event(event)])
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self, owner: str, response_id: str, after: int, log: EventLog | None) -> StoredEvents:
        """What comes behind `after`. Raises ApiError 404 once the response was deleted."""
        if log is not None and (events := log.recent(after)):
            return StoredEvents(events, kept=True, dropped=False, final=False)
        return self._told(await self._store.events(owner, response_id, after))

    def _told(self, found: StoredEvents | None) -> StoredEvents:
        if found is None:
            raise not_found()
        if found.dropped:
            raise bad_request(
                "The events of this response were dropped: they had more than the limit of "
                f"{self._logs.max_bytes / _MIB:.3g} MiB. The response itself can be read.",
                "stream",
                "events_dropped",
            )
        if not found.kept:
            raise bad_request(
                "Only a response that was made with both 'background' and 'stream' can be streamed later.",
                "stream",
                "unsupported_value",
            )
        return found


async def _wait(changed: asyncio.Event | None) -> None:
    """Until the store has more, or it is time to look what another gateway has written."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_TICK_S):
            if changed is None:
                await asyncio.sleep(_TICK_S)
            else:
                await changed.wait()


async def _send_part(send: Send, events: Sequence[bytes]) -> None:
    await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
