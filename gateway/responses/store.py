"""What a store of responses offers, and the events of background responses on their way to it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from gateway.errors import ApiError
from gateway.responses.objects import ResponseStatus


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response with its own input. `response` and `items` are JSON; `owner` names its owner; no
    other key is ever told of it. `runner`: the gateway that works on it in the background; `next_event`: the
    sequence number of its stream's next event, where they are kept; only `abandoned` tells it."""

    id: str
    owner: str
    status: ResponseStatus
    previous: str | None
    response: bytes
    items: bytes
    runner: str | None = None
    next_event: int | None = None


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events of a stream in a row, as they are sent; `first` is the sequence number of the first."""

    first: int
    events: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class StoredEvents:
    """What follows in a response's stream, maybe not all of it.

    kept: the response was made with a stream that is kept; dropped: it was, until it became too large;
    final: the response is, so that nothing comes behind the last of the events."""

    events: Sequence[bytes]
    kept: bool
    dropped: bool
    final: bool


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Responses, bytes, and seconds since a response was used last. What exceeds them is forgotten, that
    which was used longest ago first."""

    max_count: int
    max_bytes: int
    max_age_s: float


class ConversationTooLarge(Exception):
    """A conversation has more bytes than the caller wants to have."""


class ResponseStore(ABC):
    """Responses by id. All methods raise ApiError 503 if the store does not answer."""

    @abstractmethod
    async def open(self) -> None:
        """Make ready for the other methods. Raises StartRefused if the store cannot be used."""

    @abstractmethod
    async def add(
        self, record: StoredResponse, lease_s: float = 0.0, events: Sequence[bytes] | None = None
    ) -> None:
        """Keep a response. One with a runner must be renewed by it within `lease_s`, until it is final.

        `events`: the first ones of its stream, which is kept then."""

    @abstractmethod
    async def update(
        self, response_id: str, status: ResponseStatus, response: bytes, last: EventBatch | None = None
    ) -> bool:
        """Replace a response that is not final, and add events to its stream, both or none. False: it was
        final already, or is gone."""

    @abstractmethod
    async def add_events(self, batches: Mapping[str, EventBatch], dropped: Collection[str]) -> None:
        """Add to the streams of responses that are not final, and forget those of the `dropped` ones."""

    @abstractmethod
    async def events(self, owner: str, response_id: str, after: int) -> StoredEvents | None:
        """Events behind the one with that sequence number; None: the response is not there."""

    @abstractmethod
    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """A response, which counts as a use."""

    @abstractmethod
    async def conversation(self, owner: str, response_id: str, max_bytes: int) -> list[StoredResponse] | None:
        """A response and all that it goes on from, oldest first, which counts as a use of each.

        None if one of them is not there (any more). Raises ConversationTooLarge."""

    @abstractmethod
    async def items(self, owner: str, item_ids: Sequence[str]) -> dict[str, bytes]:
        """The JSON of items of responses, as far as they are there, by their ids; a use of each response.

        They are those of all inputs, and of the outputs of final responses."""

    @abstractmethod
    async def delete(self, owner: str, response_id: str) -> bool:
        """Forget a response. False: it was not there."""

    @abstractmethod
    async def renew(self, runner: str, lease_s: float) -> set[str]:
        """Say that `runner` lives for `lease_s` more. Returns the ids of its responses that are not final:
        what it runs besides was cancelled or deleted."""

    @abstractmethod
    async def abandoned(self) -> list[StoredResponse]:
        """Responses that are not final and whose runner was not renewed in time."""

    @abstractmethod
    async def sweep(self) -> None:
        """Forget what is too old."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of it."""


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
