"""Events of background responses on their way to the store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from gateway.errors import ApiError
from gateway.responses.objects import ResponseStatus
from gateway.responses.store import EventBatch, ResponseStore

FLUSH_S = 0.05
"""Events wait so long for others to be stored with."""


class EventLog:
    """The stream of one response that this gateway makes. Readers are given what is stored, never more: a
    reader finds an event that it was given again after any fault."""

    def __init__(self, response_id: str, begun: Sequence[bytes], max_bytes: int) -> None:
        """`begun`: its first events, which are stored already."""
        self.response_id = response_id
        self.number = len(begun)
        """The sequence number of the next event."""
        self.dropped = False
        """It became larger than `max_bytes`, so that nothing of it is kept."""
        self.forgotten = False
        """The store knows of that."""
        self.changed = asyncio.Event()
        """Set when the store has more, and then replaced by another one."""
        self._max_bytes = max_bytes
        self._bytes = sum(map(len, begun))
        self._waiting: list[bytes] = []
        self._recent = EventBatch(0, tuple(begun))

    def add(self, events: Sequence[bytes]) -> None:
        """Take the next events."""
        self.number += len(events)
        self._bytes += sum(map(len, events))
        self._waiting += events
        if self._bytes > self._max_bytes:
            self.dropped = True
            self._waiting.clear()

    def waiting(self) -> EventBatch:
        """What is not stored yet."""
        return EventBatch(self.number - len(self._waiting), tuple(self._waiting))

    def stored(self, batch: EventBatch) -> None:
        """What `waiting` gave is in the store."""
        if not self.dropped:
            del self._waiting[: len(batch.events)]
            self._recent = batch
        self.notify()

    def recent(self, after: int) -> Sequence[bytes]:
        """What was stored last, if it is what comes next for a reader; else nothing."""
        return self._recent.events if after + 1 == self._recent.first and not self.dropped else ()

    def notify(self) -> None:
        """Wake the readers."""
        self.changed.set()
        self.changed = asyncio.Event()


class EventLogs:
    """The logs of all responses that this gateway makes, stored together."""

    def __init__(self, store: ResponseStore, max_bytes: int) -> None:
        """`max_bytes`: of one response's events."""
        self.max_bytes = max_bytes
        self._store = store
        self._logs: dict[str, EventLog] = {}
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def open(self, response_id: str, begun: Sequence[bytes]) -> EventLog:
        """Begin a log, of a response that is in the store with its first events."""
        log = self._logs[response_id] = EventLog(response_id, begun, self.max_bytes)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="response-events")
        return log

    def get(self, response_id: str) -> EventLog | None:
        """The log of a response that is made here."""
        return self._logs.get(response_id)

    async def finish(self, response_id: str, status: ResponseStatus, response: bytes) -> None:
        """Store a final response, with its last events if it has a log. Raises ApiError 503."""
        log = self._logs.get(response_id)
        # Not while others of its events are on their way.
        async with self._lock:
            last = None if log is None or log.dropped else log.waiting()
            if await self._store.update(response_id, status, response, last) and log is not None and last:
                log.stored(last)
            if log is not None and log.dropped and not log.forgotten:
                await self._store.add_events({}, {response_id})

    def close(self, response_id: str) -> None:
        """The response is made no longer."""
        if (log := self._logs.pop(response_id, None)) is not None:
            log.notify()

    async def flush(self) -> None:
        """Store what waits. Raises ApiError 503; it waits on then."""
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
            # What the store refuses it has logged; the next time more is stored.
            with suppress(ApiError):
                await self.flush()
            await asyncio.sleep(FLUSH_S)
