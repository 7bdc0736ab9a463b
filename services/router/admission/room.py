"""All sequences that wait: the queues of all models, deadlines, and counts of each class since the start."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from catenary.v1 import common_pb2
from services.router.admission.lanes import LANES, T, Ticket, lane_of
from services.router.admission.queue import ModelQueue, QueueOptions
from services.router.admission.refusals import Refused, does_not_fit, not_served, too_late
from services.router.admission.validation import sequences_of
from services.router.fleet import Engine

H = TypeVar("H", bound=Hashable)

TICK_S = 0.05


class Deadlines(Generic[H]):
    """Things by the tick of their deadline. To add and to discard one is constant in time; `due` looks at the
    ticks in which anything is due some time."""

    def __init__(self) -> None:
        self._ticks: dict[int, dict[H, None]] = {}

    def add(self, thing: H, deadline: float) -> None:
        """It is due at `deadline`, in monotonic seconds, or up to a tick later."""
        self._ticks.setdefault(_tick(deadline), {})[thing] = None

    def discard(self, thing: H, deadline: float) -> None:
        """It is not due any more. `deadline` is the one that it was added with."""
        tick = _tick(deadline)
        things = self._ticks.get(tick)
        if things is None:
            return
        things.pop(thing, None)
        if not things:
            del self._ticks[tick]

    def due(self, now: float) -> list[H]:
        """The due ones, in order; each stays until it is discarded."""
        last = now / TICK_S
        return [
            thing
            for tick in sorted(tick for tick in self._ticks if tick <= last)
            for thing in self._ticks[tick]
        ]


def _tick(deadline: float) -> int:
    """The first tick that is not before the deadline."""
    return -int(-deadline // TICK_S)


class RefusedFor(StrEnum):
    """Why a sequence that could have been served was not let in. A closed set: it labels a metric."""

    QUEUE_FULL = "queue_full"
    ROUTER_FULL = "router_full"
    WAITED_TOO_LONG = "waited_too_long"
    NOT_SERVED = "not_served"
    DRAINING = "draining"


@dataclass(slots=True)
class LaneCounts:
    """Sequences of one class. `admitted`: given to an engine for the first time."""

    admitted: int = 0
    promoted: int = 0
    refused: dict[RefusedFor, int] = field(default_factory=lambda: dict.fromkeys(RefusedFor, 0))


@dataclass(frozen=True, slots=True)
class LaneView:
    """A lane over all models, as it is now. `oldest_wait_s`: of those that are next in their tenants'
    rows."""

    counts: LaneCounts
    queued_sequences: int
    queued_tokens: int
    tenants: int
    oldest_wait_s: float
    live_sequences: int


def lane_counts() -> list[LaneCounts]:
    """Zeros for every class."""
    return [LaneCounts() for _ in LANES]


class WaitingRoom(Generic[T]):
    """Holds tickets; the caller decides which ticket an engine gets. `cost`: see FairQueue."""

    def __init__(self, options: QueueOptions, cost: Callable[[Ticket[T]], int]) -> None:
        self._options = options
        self._cost = cost
        self._queues: dict[str, ModelQueue[T]] = {}
        self._deadlines: Deadlines[Ticket[T]] = Deadlines()
        self._count = 0
        self.counts = lane_counts()

    def __len__(self) -> int:
        """Sequences that wait."""
        return self._count

    def __iter__(self) -> Iterator[ModelQueue[T]]:
        """The queues of models that were served lately, or of which something is here."""
        return iter(self._queues.values())

    def queue_of(self, model: str) -> ModelQueue[T]:
        """The queue of a model, made if there is none."""
        queue = self._queues.get(model)
        if queue is None:
            queue = self._queues[model] = ModelQueue(model, self._options, self._cost)
        return queue

    def ticket(
        self, item: T, spec: common_pb2.SequenceSpec, now: float, *, first: bool, apart: bool
    ) -> Ticket[T]:
        """The ticket of a sequence that came now; it does not wait yet."""
        lane = lane_of(spec)
        wait_s = self._options.wait_s[lane]
        if spec.HasField("max_wait_ms"):
            wait_s = min(wait_s, spec.max_wait_ms / 1000)
        return Ticket(
            item=item,
            model=spec.model,
            home=lane,
            tenant=spec.tenant,
            tokens=len(spec.token_ids),
            sequences=sequences_of(spec),
            since=now,
            deadline=now + wait_s,
            first=first,
            apart=apart,
        )

    def check(self, ticket: Ticket[T], kv_tokens: int, now: float, *, served: bool) -> None:
        """Whether a newcomer may wait. `kv_tokens`: that it needs room for; `served`: an engine serves its
        model.

        Raises:
            Refused: it would wait in vain, or there is no more room to wait. Counted, but for what no engine
                could ever hold.
        """
        lane, queue = ticket.home, self.queue_of(ticket.model)
        if kv_tokens > queue.largest_kv > 0:
            raise does_not_fit(kv_tokens, queue.largest_kv)
        if not queue.lately_served(now):
            self.refused(lane, RefusedFor.NOT_SERVED)
            raise self._not_served()
        if ticket.deadline <= now:
            self.refused(lane, RefusedFor.WAITED_TOO_LONG)
            raise too_late(ticket, queue.retry_after_ms(lane, now))
        if ticket.first:
            return
        try:
            queue.check(ticket, now)
        except Refused:
            self.refused(lane, RefusedFor.QUEUE_FULL if served else RefusedFor.NOT_SERVED)
            if not served:
                raise self._not_served() from None
            raise

    def turn_away(self, ticket: Ticket[T], now: float) -> common_pb2.Error:
        """Count one that has waited too long; returns what it is told. Whether for room or for an engine
        makes a difference."""
        queue = self.queue_of(ticket.model)
        if not queue.served:
            self.refused(ticket.home, RefusedFor.NOT_SERVED)
            return self._not_served().error
        self.refused(ticket.home, RefusedFor.WAITED_TOO_LONG)
        return too_late(ticket, queue.retry_after_ms(ticket.home, now)).error

    def add(self, ticket: Ticket[T], now: float, *, foremost: bool = False) -> None:
        """Let it wait; no bound is checked. `foremost`: in front of its lane."""
        ticket.waits = True
        self._count += ticket.sequences
        self._deadlines.add(ticket, ticket.deadline)
        self.queue_of(ticket.model).add(ticket, now, foremost=foremost)

    def take(self, ticket: Ticket[T], now: float) -> None:
        """An engine has it, whether it waited or not."""
        if ticket.waits:
            self._leave(ticket)
            self._queues[ticket.model].take(ticket, now)
        if not ticket.admitted:
            ticket.admitted = True
            self.counts[ticket.home].admitted += 1

    def remove(self, ticket: Ticket[T]) -> None:
        """It waits no longer. Idempotent."""
        if not ticket.waits:
            return
        self._leave(ticket)
        self._queues[ticket.model].remove(ticket)

    def refused(self, lane: int, reason: RefusedFor) -> None:
        """Count a refusal."""
        self.counts[lane].refused[reason] += 1

    def due(self, now: float) -> list[Ticket[T]]:
        """The tickets that have waited as long as they may."""
        return self._deadlines.due(now)

    def tickets(self) -> list[Ticket[T]]:
        """All that waits, in the order in which it would be refused."""
        return self._deadlines.due(float("inf"))

    def promote(self, now: float) -> None:
        """Move up what has waited long in its lane."""
        for queue in self._queues.values():
            for ticket in queue.lanes.promote(now):
                self.counts[ticket.home].promoted += 1

    def refresh(self, engines: Iterable[Engine], now: float, knows: Callable[[str], bool]) -> None:
        """Look at the engines: how many places there are, and which models are served.

        A queue that is empty and belongs to a model that is forgotten (`knows`) is forgotten too.
        """
        places: dict[str, list[int]] = {}
        largest: dict[str, int] = {}
        longest: dict[str, int] = {}
        for engine in engines:
            name = engine.model.name
            largest[name] = max(largest.get(name, 0), engine.kv_tokens)
            longest[name] = max(longest.get(name, 0), engine.model.max_model_len)
            if engine.serving:
                found = places.setdefault(name, [0, 0])
                found[0] += engine.capacity.max_running + engine.backlog
                found[1] += engine.foreign_sequences
        for name in places:
            self.queue_of(name).served_at = now
        for name, queue in list(self._queues.items()):
            queue.served = name in places
            if queue.idle and not knows(name):
                del self._queues[name]
                continue
            queue.places.update(*places.get(name, (0, 0)))
            queue.largest_kv = largest.get(name, 0)
            queue.longest = longest.get(name, 0)

    def views(self, now: float) -> list[LaneView]:
        """The lanes over all models."""
        return [self._view(lane, now) for lane in LANES]

    def _view(self, lane: int, now: float) -> LaneView:
        queues = self._queues.values()
        oldest = min((since for queue in queues for since in queue.arrivals(lane)), default=now)
        return LaneView(
            counts=self.counts[lane],
            queued_sequences=sum(queue.held[lane].sequences for queue in queues),
            queued_tokens=sum(queue.held[lane].tokens for queue in queues),
            tenants=sum(queue.tenants(lane) for queue in queues),
            oldest_wait_s=now - oldest,
            live_sequences=sum(queue.places.load.placed[lane] for queue in queues),
        )

    def _not_served(self) -> Refused:
        # How fast a lane empties says nothing of when an engine comes.
        return not_served(self._options.retry_after_ms)

    def _leave(self, ticket: Ticket[T]) -> None:
        ticket.waits = False
        self._count -= ticket.sequences
        self._deadlines.discard(ticket, ticket.deadline)
