"""Responses that are made in the background, without a waiting client."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from catenary.backoff import Backoff
from catenary.telemetry import get_logger
from gateway.auth import Caller
from gateway.errors import ApiError, internal, overloaded, unavailable
from gateway.generation.service import Endpoint, GenerationService, Running
from gateway.responses import events
from gateway.responses.library import record_of
from gateway.responses.objects import ResponseStatus, decode_response, encode_response
from gateway.responses.producer import Producer, final_event
from gateway.responses.request import ResponseRequest
from gateway.responses.store import EventBatch, ResponseStore
from gateway.responses.streams import EventLog, EventLogs, EventStreams
from gateway.schemas.chat import ChatRequest
from gateway.state.jobs import JobOwner, JobRunner

_log = get_logger(__name__)


_TURN_S = 0.3
# Errors of a response that has not begun, after which it is tried again.
_RETRIED = frozenset({429, 503})


class BackgroundRuns(JobOwner):
    """Runs stored responses of this gateway, and ends those of gateways that have died.

    A response that is cancelled or deleted, here or at another gateway, is given up within a turn."""

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
            generation: runs the chats.
            endpoint: how they are rendered.
            store: where the responses are.
            max_running: responses at work at a time.
            max_event_bytes: of the events of one of them.
            max_streams: streams of events at a time.
            lease_s: seconds between two looks for responses of dead gateways.
        """
        self._generation = generation
        self._endpoint = endpoint
        self._store = store
        self._logs = EventLogs(store, max_event_bytes)
        self.streams = EventStreams(store, self._logs, max_streams)
        """Sends the events of the responses."""
        self._max_running = max_running
        self._runner = JobRunner(store.jobs, self, turn_s=_TURN_S, sweep_s=lease_s)
        self._starting = 0
        self.run, self.stop = self._runner.run, self._runner.stop

    async def start(self, request: ResponseRequest, caller: Caller) -> None:
        """Store a response and begin to work on it. Raise ApiError: 429, or 503 of the store."""
        if len(self._runner.running) + self._starting >= self._max_running:
            raise overloaded(
                f"The server is working on its limit of {self._max_running} background responses."
            )
        begun = _opening(request) if request.stream else None
        # Other requests may start while the store writes.
        self._starting += 1
        try:
            await self._store.add(record_of(request, self._runner.name), begun)
        finally:
            self._starting -= 1
        log = None if begun is None else self._logs.open(request.response.id, begun)
        self._runner.start(request.response.id, self._run(request, caller, log))

    async def close(self) -> None:
        """End what still runs with an error, and close the store."""
        if self._runner.running:
            with suppress(ApiError):
                await self._logs.flush()
            await self._runner.close()
            with suppress(ApiError):
                await self._end_abandoned()
        await self._store.close()

    def ended(self, job_id: str) -> None:
        self._logs.close(job_id)

    async def sweep(self) -> None:
        await self._end_abandoned()
        await self._store.sweep()

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
        """Store a final response. While the store refuses it (its disk is full), retry with a backoff."""
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
        while (claimed := await self._store.claim(self._runner.name, self._runner.running)) is not None:
            record, number = claimed
            response = decode_response(record.response)
            response.fail(unavailable("The gateway that made the response ended."), int(time.time()))
            last = None if number is None else EventBatch(number, [final_event(response, number)])
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
