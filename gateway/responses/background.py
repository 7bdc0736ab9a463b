"""Responses made in the background, and the streams of their events: stored, then sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from starlette.types import Receive, Send

from catenary.backoff import Backoff
from catenary.telemetry import get_logger
from gateway.auth import Caller
from gateway.errors import ApiError, bad_request, internal, overloaded, unavailable
from gateway.generation.service import GenerationService, Running
from gateway.http.request import ClientWatch
from gateway.responses import events
from gateway.responses.events import Error, encode_event
from gateway.responses.objects import ResponseStatus, decode_response, encode_response
from gateway.responses.producer import Producer, final_event
from gateway.responses.request import ResponseRequest
from gateway.responses.store import EventBatch, ResponseStore, StoredEvents, not_found
from gateway.state.jobs import JobOwner, JobRunner
from gateway.streaming.answers import SSE_HEADERS

_log = get_logger(__name__)


# Between two transactions with new events.
_FLUSH_S = 0.05
# Between two looks for events that another gateway has stored.
_LOOK_S = 0.3
_MIB = 1 << 20


class EventLog:
    """Stream of one response that this gateway makes.

    Readers are sent stored events only, so that each event that was sent is found again after any fault."""

    def __init__(self, response_id: str, begun: Sequence[bytes], max_bytes: int) -> None:
        """Make a log. `begun`: its first events, which are stored already."""
        self.response_id = response_id
        self.number = len(begun)
        self.dropped = False
        """Whether it became larger than `max_bytes`, so that no event of it stays stored."""
        self.forgotten = False
        """Whether the store has deleted its events."""
        self.changed = asyncio.Event()
        """Set when more is stored, and then replaced by another one."""
        self._max_bytes = max_bytes
        self._bytes = sum(map(len, begun))
        self._waiting: list[bytes] = []
        self._recent = EventBatch(0, tuple(begun))

    def add(self, events: Sequence[bytes]) -> None:
        self.number += len(events)
        self._bytes += sum(map(len, events))
        self._waiting += events
        if self._bytes > self._max_bytes:
            self.dropped = True
            self._waiting.clear()

    def waiting(self) -> EventBatch:
        """Return the events that are not stored yet."""
        return EventBatch(self.number - len(self._waiting), tuple(self._waiting))

    def stored(self, batch: EventBatch) -> None:
        if not self.dropped:
            del self._waiting[: len(batch.events)]
            self._recent = batch
        self.notify()

    def recent(self, after: int) -> Sequence[bytes]:
        """Return the batch that was stored last if it follows `after`, else nothing."""
        return self._recent.events if after + 1 == self._recent.first and not self.dropped else ()

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class EventLogs:
    """Logs of all responses that this gateway makes, which are stored together."""

    def __init__(self, store: ResponseStore, max_bytes: int) -> None:
        """Make it empty. `max_bytes`: of one response's events."""
        self.max_bytes = max_bytes
        self._store = store
        self._logs: dict[str, EventLog] = {}
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def open(self, response_id: str, begun: Sequence[bytes]) -> EventLog:
        """Begin the log of a response that is stored with its first events."""
        log = self._logs[response_id] = EventLog(response_id, begun, self.max_bytes)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="response-events")
        return log

    def get(self, response_id: str) -> EventLog | None:
        return self._logs.get(response_id)

    async def finish(self, response_id: str, status: ResponseStatus, response: bytes) -> None:
        """Store a final response, with its last events if it has a log. Raise ApiError."""
        log = self._logs.get(response_id)
        # Earlier events of it may be in a transaction that has not ended.
        async with self._lock:
            last = None if log is None or log.dropped else log.waiting()
            if await self._store.update(response_id, status, response, last) and log is not None and last:
                log.stored(last)
            if log is not None and log.dropped and not log.forgotten:
                await self._store.add_events({}, {response_id})

    def close(self, response_id: str) -> None:
        """End the log of a response that is no longer made here."""
        if (log := self._logs.pop(response_id, None)) is not None:
            log.notify()

    async def flush(self) -> None:
        """Store the waiting events. Raise ApiError; they go on waiting then."""
        async with self._lock:
            logs = list(self._logs.values())
            batches = {log: batch for log in logs if (batch := log.waiting()).events}
            dropped = {log for log in logs if log.dropped and not log.forgotten}
            if not batches and not dropped:
                return
            await self._store.add_events(
                {log.response_id: batch for log, batch in batches.items()},
                {log.response_id for log in dropped},
            )
            for log, batch in batches.items():
                log.stored(batch)
            for log in dropped:
                log.forgotten = True
                log.notify()

    async def _run(self) -> None:
        while self._logs:
            # The store has logged the failure; the events are stored with later ones.
            with suppress(ApiError):
                await self.flush()
            await asyncio.sleep(_FLUSH_S)


class EventStreams:
    """Streams of stored events, of responses that are made here or at another gateway, or are final."""

    def __init__(self, store: ResponseStore, logs: EventLogs, max_streams: int) -> None:
        """Make it. `logs`: of the responses that are made here; `max_streams`: at a time."""
        self._store = store
        self._logs = logs
        self._max_streams = max_streams
        self.open = 0
        self._cut = False

    @contextmanager
    def place(self) -> Iterator[None]:
        """Count one stream in, which `send` needs. Raise ApiError 429."""
        if self.open >= self._max_streams:
            raise overloaded(
                f"The server is sending its limit of {self._max_streams} streams of background responses."
            )
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    def cut_off(self) -> None:
        """End all streams with an error soon: the server stops."""
        self._cut = True

    async def send(self, owner: str, response_id: str, after: int, receive: Receive, send: Send) -> None:
        """Answer with all events that follow sequence number `after` (-1: all), until the response ends.

        Raise ApiError before the answer has begun, ClientGone at any time."""
        found = self._checked(await self._store.events(owner, response_id, after))
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
        """Return events that follow `after`. Raise ApiError 404 once the response was deleted."""
        if log is not None and (events := log.recent(after)):
            return StoredEvents(events, kept=True, dropped=False, final=False)
        return self._checked(await self._store.events(owner, response_id, after))

    def _checked(self, found: StoredEvents | None) -> StoredEvents:
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
    """Wait until more is stored here, or it is time to look for events of another gateway."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_LOOK_S):
            if changed is None:
                await asyncio.sleep(_LOOK_S)
            else:
                await changed.wait()


async def _send_part(send: Send, events: Sequence[bytes]) -> None:
    await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})


_TURN_S = 0.3
# Errors of a response that has not begun, after which it is tried again.
_RETRIED = frozenset({429, 503})


class BackgroundRuns(JobOwner):
    """Runs of stored responses of this gateway, and ends for those of gateways that have died.

    A response that is cancelled or deleted, here or at another gateway, is given up within a turn."""

    def __init__(
        self,
        generation: GenerationService,
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
            store: of the responses.
            max_running: responses at work at a time.
            max_event_bytes: of the events of one of them.
            max_streams: streams of events at a time.
            lease_s: seconds between two looks for responses of dead gateways.
        """
        self._generation = generation
        self._store = store
        self._logs = EventLogs(store, max_event_bytes)
        self.streams = EventStreams(store, self._logs, max_streams)
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
            await self._store.add(request.record(self._runner.name), begun)
        finally:
            self._starting -= 1
        log = None if begun is None else self._logs.open(request.response.id, begun)
        self._runner.start(request.response.id, self._run(request, caller, log))

    async def close(self) -> None:
        if self._runner.running:
            with suppress(ApiError):
                await self._logs.flush()
            await self._runner.close()
            with suppress(ApiError):
                await self._end_abandoned()

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
        requests, response = self._generation.requests, request.response
        deadline = requests.deadline()
        backoff = Backoff(0.1, 5.0)
        while True:
            try:
                async with requests.detached(caller, deadline=deadline) as active:
                    prepared = request.prepared(active.admit(request.chat), caller)
                    plan = await self._generation.plan(prepared, active)
                    async with self._generation.run(plan, active) as running:
                        await running.begin()
                        response.status = ResponseStatus.IN_PROGRESS
                        # Only its end counts, which the store may accept by then.
                        with suppress(ApiError):
                            await self._store.update(response.id, response.status, encode_response(response))
                        await _finish(request, running, log)
                        return
            except ApiError as error:
                late = asyncio.get_running_loop().time() >= deadline
                if response.status is not ResponseStatus.QUEUED or error.status not in _RETRIED or late:
                    raise
                if requests.draining:
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
    return [encode_event(kind(number, request.response)) for number, kind in enumerate(kinds)]


async def _finish(request: ResponseRequest, running: Running, log: EventLog | None) -> None:
    if log is None:
        await Producer(request.response, running).finish()
        return
    async for made in Producer(request.response, running, log.number).stream(events.InProgress):
        log.add(made)
