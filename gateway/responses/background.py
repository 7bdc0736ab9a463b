"""Responses that are made in the background, without a waiting client, and the streams that tell of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from starlette.types import Receive, Send

from catenary.backoff import Backoff
from catenary.telemetry import get_logger, new_id
from gateway.auth import Caller
from gateway.errors import ApiError, bad_request, internal, overloaded, unavailable
from gateway.generation.service import Endpoint, GenerationService, Running
from gateway.http.disconnect import ClientWatch
from gateway.responses import events
from gateway.responses.events import Error, encode_event
from gateway.responses.library import not_found, record_of
from gateway.responses.objects import ResponseStatus, decode_response, encode_response
from gateway.responses.producer import Producer, final_event
from gateway.responses.request import ResponseRequest
from gateway.responses.store import EventBatch, EventLog, EventLogs, ResponseStore, StoredEvents
from gateway.schemas.chat import ChatRequest
from gateway.streaming.writer import SSE_HEADERS

_log = get_logger(__name__)


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


_RETRIED = frozenset({429, 503})


class BackgroundRuns:
    """Runs stored responses of this gateway, and looks after the store.

    A response is known to be worked on while this gateway says so in the store; if it dies, another one, or
    the same after its start, ends the response with an error. What is cancelled or deleted, here or at
    another gateway, is noticed within a tick."""

    def __init__(
        self,
        generation: GenerationService,
        endpoint: Endpoint[ChatRequest],
        store: ResponseStore,
        *,
        max_running: int,
        max_event_bytes: int,
        max_streams: int,
        lease_s: float,
    ) -> None:
        """Set it up.

        Args:
            generation: what runs the chats.
            endpoint: how they are rendered.
            store: where the responses are.
            max_running: responses at work at a time.
            max_event_bytes: of the events of one of them.
            max_streams: that tell of them at a time.
            lease_s: seconds without a word from a gateway after which it counts as dead.
        """
        self._generation = generation
        self._endpoint = endpoint
        self._store = store
        self._logs = EventLogs(store, max_event_bytes)
        self.streams = EventStreams(store, self._logs, max_streams)
        """What tells of them."""
        self._max_running = max_running
        self._lease_s = lease_s
        self._runner = new_id("gateway-")
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._starting = 0

    async def start(self, request: ResponseRequest, caller: Caller) -> None:
        """Store a response and begin to work on it. Raises ApiError: 429, or 503 of the store."""
        if len(self._tasks) + self._starting >= self._max_running:
            raise overloaded(
                f"The server is working on its limit of {self._max_running} background responses."
            )
        response_id = request.response.id
        begun = _opening(request) if request.stream else None
        # Others ask for a place while the store writes.
        self._starting += 1
        try:
            await self._store.add(record_of(request, self._runner), self._lease_s, begun)
        finally:
            self._starting -= 1
        log = None if begun is None else self._logs.open(response_id, begun)
        task = asyncio.create_task(self._run(request, caller, log), name=f"background-{response_id}")
        self._tasks[response_id] = task
        task.add_done_callback(lambda _: self._ended(response_id))

    def stop(self, response_id: str) -> None:
        """Stop working on a response that was cancelled or deleted."""
        if (task := self._tasks.get(response_id)) is not None:
            task.cancel()

    async def run(self) -> None:
        """Look after the store until cancelled."""
        cared = 0.0
        while True:
            try:
                if self._tasks:
                    known = set(self._tasks)
                    for response_id in known - await self._store.renew(self._runner, self._lease_s):
                        self.stop(response_id)
                if time.monotonic() - cared >= self._lease_s:
                    cared = time.monotonic()
                    await self._end_abandoned()
                    await self._store.sweep()
            except ApiError:
                # It was logged where it happened; the next tick tries again. Other gateways could not renew
                # their leases either: they get a lease's time for it before their responses are ended.
                _log.warning("store of responses not looked after")
                cared = time.monotonic()
            await asyncio.sleep(_TICK_S)

    async def close(self) -> None:
        """End what still runs with an error, and let go of the store."""
        running = list(self._tasks.values())
        if running:
            with suppress(ApiError):
                await self._logs.flush()
            for task in running:
                task.cancel()
            await asyncio.wait(running)
            with suppress(ApiError):
                await self._store.renew(self._runner, -1.0)
                await self._end_abandoned()
        await self._store.close()

    def _ended(self, response_id: str) -> None:
        self._tasks.pop(response_id, None)
        self._logs.close(response_id)

    async def _run(self, request: ResponseRequest, caller: Caller, log: EventLog | None) -> None:
        response = request.response
        try:
            await self._produce(request, caller, log)
        except ApiError as error:
            response.fail(request.renamed(error), int(time.time()))
        except Exception:
            _log.exception("background response failed", response=response.id)
            response.fail(internal(), int(time.time()))
        data = await request.written(lambda: encode_response(response))
        if log is not None:
            log.add([await request.written(lambda: final_event(response, log.number))])
        await self._keep_final(response.id, response.status, data)

    async def _keep_final(self, response_id: str, status: ResponseStatus, data: bytes) -> None:
        """Store a final response. While the store refuses it (its disk is full), try again with a backoff."""
        backoff = Backoff(0.1, 5.0)
        while True:
            try:
                await self._logs.finish(response_id, status, data)
                return
            except ApiError:
                _log.warning("a response that has ended is not stored yet", response=response_id)
            await asyncio.sleep(backoff.next_delay())

    async def _produce(self, request: ResponseRequest, caller: Caller, log: EventLog | None) -> None:
        response, deadline = request.response, self._generation.deadline()
        backoff = Backoff(0.1, 5.0)
        while True:
            try:
                with self._generation.place():
                    async with self._generation.run(
                        self._endpoint, request.chat, caller, deadline=deadline
                    ) as running:
                        await running.begin()
                        response.status = ResponseStatus.IN_PROGRESS
                        # What counts is its end, which the store may take by then.
                        with suppress(ApiError):
                            await self._store.update(response.id, response.status, encode_response(response))
                        await _finish(request, running, log)
                        return
            except ApiError as error:
                late = asyncio.get_running_loop().time() >= deadline
                if response.status is not ResponseStatus.QUEUED or error.status not in _RETRIED or late:
                    raise
                if self._generation.draining:
                    raise
            await asyncio.sleep(backoff.next_delay())

    async def _end_abandoned(self) -> None:
        for record in await self._store.abandoned():
            response = decode_response(record.response)
            response.fail(unavailable("The gateway that made the response ended."), int(time.time()))
            number, last = record.next_event, None
            if number is not None:
                last = EventBatch(number, [final_event(response, number)])
            await self._store.update(record.id, ResponseStatus.FAILED, encode_response(response), last)


def _opening(request: ResponseRequest) -> list[bytes]:
    kinds = (events.Created, events.Queued)
    return [events.encode_event(kind(number, request.response)) for number, kind in enumerate(kinds)]


async def _finish(request: ResponseRequest, running: Running, log: EventLog | None) -> None:
    if log is None:
        await Producer(request.response, running).finish()
        return
    async for made in Producer(request.response, running, log.number).stream(events.InProgress):
        log.add(made)
