"""Responses that are made in the background, without a waiting client."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from catenary.backoff import Backoff
from catenary.telemetry import get_logger, new_id
from gateway.errors import ApiError, internal, overloaded, unavailable
from gateway.generation.endpoint import Endpoint
from gateway.generation.service import GenerationService, Running
from gateway.responses import events
from gateway.responses.event_log import EventLog, EventLogs
from gateway.responses.event_streams import EventStreams
from gateway.responses.library import record_of
from gateway.responses.objects import ResponseStatus, decode_response, encode_response
from gateway.responses.producer import Producer, final_event
from gateway.responses.request import ResponseRequest
from gateway.responses.store import EventBatch, ResponseStore
from gateway.schemas.chat import ChatRequest

_log = get_logger(__name__)
_TICK_S = 0.3
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

    async def start(self, request: ResponseRequest, cache_salt: str) -> None:
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
        task = asyncio.create_task(self._run(request, cache_salt, log), name=f"background-{response_id}")
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

    async def _run(self, request: ResponseRequest, cache_salt: str, log: EventLog | None) -> None:
        response = request.response
        try:
            await self._produce(request, cache_salt, log)
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

    async def _produce(self, request: ResponseRequest, cache_salt: str, log: EventLog | None) -> None:
        response, deadline = request.response, self._generation.deadline()
        backoff = Backoff(0.1, 5.0)
        while True:
            try:
                with self._generation.place():
                    async with self._generation.run(
                        self._endpoint, request.chat, cache_salt=cache_salt, deadline=deadline
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
