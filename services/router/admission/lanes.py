"""The queues of one model: four lanes, each with its tenants, and promotion between them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Generic

from services.router.admission.fairness import FairQueue
from services.router.admission.lane import INTERACTIVE, LANES, Row, T, Ticket


class Lanes(Generic[T]):
    """Tickets by lane. In a lane, those marked `first` come before the tenants' turns.

    The first ticket of a tenant that has waited in its lane for `promote_after_s` moves up one lane, but not
    into SYSTEM, and only when the one that moved before it is gone: a tenant that lets thousands wait in a
    low lane has one at a time in the next.
    """

    def __init__(self, quantum: int, cost: Callable[[Ticket[T]], int], promote_after_s: float) -> None:
        self._promote_after_s = promote_after_s
        self._fronts: list[Row[T]] = [OrderedDict() for _ in LANES]
        self._queues: list[FairQueue[T]] = [FairQueue(quantum, cost) for _ in LANES]
        # By lane that they were promoted to, and tenant.
        self._promoted: dict[tuple[int, str], Ticket[T]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def firsts(self) -> Iterator[Ticket[T]]:
        """The next ticket of each tenant in each lane, and the first of those in front."""
        for front, queue in zip(self._fronts, self._queues, strict=True):
            yield from islice(front, 1)
            yield from queue.firsts()

    def add(self, ticket: Ticket[T], now: float, *, foremost: bool = False) -> None:
        """Let it wait in its home lane. `foremost`: in front of all others there, even those marked
        `first`."""
        self._count += 1
        self._enter(ticket, ticket.home, now)
        if foremost:
            self._fronts[ticket.lane].move_to_end(ticket, last=False)

    def heads(self) -> Iterator[Ticket[T]]:
        """The next ticket of each lane, the most urgent lane first."""
        for lane in LANES:
            if (head := self.head(lane)) is not None:
                yield head

    def head(self, lane: int) -> Ticket[T] | None:
        """The next ticket of a lane."""
        front = self._fronts[lane]
        return next(iter(front)) if front else self._queues[lane].head()

    def behind(self, head: Ticket[T], count: int) -> Iterator[Ticket[T]]:
        """Tickets other than `head`, the most urgent lanes first; of each lane at least `count`, if it has so
        many."""
        for front, queue in zip(self._fronts, self._queues, strict=True):
            found = chain(islice(front, count), queue.some(count))
            yield from (ticket for ticket in found if ticket is not head)

    def take(self, ticket: Ticket[T]) -> None:
        """Remove a ticket that is served: the head of a lane, or one that is let past it."""
        self._count -= 1
        self._unpromoted(ticket)
        if ticket in self._fronts[ticket.lane]:
            del self._fronts[ticket.lane][ticket]
        else:
            self._queues[ticket.lane].take(ticket)

    def remove(self, ticket: Ticket[T]) -> None:
        """Remove any ticket, which is not served."""
        self._count -= 1
        self._leave(ticket)

    def blocked(self, lane: int, *, first: bool) -> bool:
        """Whether something waits that comes before a newcomer to `lane`, or to its front."""
        if not self._count:
            return False
        if any(self._fronts[each] or self._queues[each] for each in range(lane)):
            return True
        return bool(self._fronts[lane] or (self._queues[lane] and not first))

    def promote(self, now: float) -> list[Ticket[T]]:
        """Move up what has waited long, and tell which."""
        moved = []
        # From the top, so that nothing moves twice at once.
        for lane in range(INTERACTIVE + 1, len(LANES)):
            firsts = [*self._queues[lane].firsts(), *list(self._fronts[lane])[:1]]
            for ticket in firsts:
                if now - ticket.entered < self._promote_after_s:
                    continue
                if (lane - 1, ticket.tenant) in self._promoted:
                    continue
                self._leave(ticket)
                self._enter(ticket, lane - 1, now)
                self._promoted[lane - 1, ticket.tenant] = ticket
                moved.append(ticket)
        return moved

    def _enter(self, ticket: Ticket[T], lane: int, now: float) -> None:
        ticket.lane, ticket.entered = lane, now
        if ticket.first:
            self._fronts[lane][ticket] = None
        else:
            self._queues[lane].add(ticket)

    def _leave(self, ticket: Ticket[T]) -> None:
        self._unpromoted(ticket)
        if ticket in self._fronts[ticket.lane]:
            del self._fronts[ticket.lane][ticket]
        else:
            self._queues[ticket.lane].remove(ticket)

    def _unpromoted(self, ticket: Ticket[T]) -> None:
        key = ticket.lane, ticket.tenant
        if self._promoted.get(key) is ticket:
            del self._promoted[key]
