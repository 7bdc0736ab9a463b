"""All that waits: the queues of all models, their deadlines and what is counted of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Generic

from catenary.v1 import common_pb2
from services.router.admission.counts import LaneView, RefusedFor, lane_counts
from services.router.admission.deadlines import Deadlines
from services.router.admission.lane import LANES, T, Ticket, lane_of
from services.router.admission.queue import ModelQueue, QueueOptions
from services.router.admission.validation import sequences_of
from services.router.fleet import Engine


class WaitingRoom(Generic[T]):
    """Holds tickets; who calls decides whom an engine gets. `cost`: see FairQueue."""

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
        """What has waited as long as it may."""
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

    def _leave(self, ticket: Ticket[T]) -> None:
        ticket.waits = False
        self._count -= ticket.sequences
        self._deadlines.discard(ticket, ticket.deadline)
