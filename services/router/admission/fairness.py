"""Tenants take turns: deficit round robin, by Shreedhar and Varghese (SIGCOMM 1995).

Each round, every tenant that waits may spend one quantum of tokens more, in a fixed order; what it cannot
spend because its next ticket costs more, it keeps. Rounds in which no tenant can spend are not gone through:
each tenant knows in which round it can pay for its first ticket, and a heap holds the next.
A decision costs the logarithm of the number of tenants that wait, whatever tickets cost.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Generic

from services.router.admission.lane import Row, T, Ticket

# Stale entries of the heap beyond twice the tenants are cleared away.
_SLACK = 16


class _Tenant(Generic[T]):
    """Tickets of a tenant in their order. `credit`: tokens that it may spend in round `turn`."""

    __slots__ = ("credit", "name", "order", "row", "turn")

    def __init__(self, name: str, order: int, turn: int, quantum: int) -> None:
        self.name = name
        self.order = order
        self.turn = turn
        self.credit = quantum
        self.row: Row[T] = OrderedDict()

    @property
    def first(self) -> Ticket[T]:
        return next(iter(self.row))


class FairQueue(Generic[T]):
    """Tickets of one lane. First come, first served within a tenant; a tenant without tickets is forgotten.

    `quantum`: tokens of a turn. `cost`: asked once for each ticket, when it is the first of its tenant.

    A tenant whose first ticket costs c is served after at most ceil(c / quantum) + 1 rounds, in each of which
    another one gets a quantum at the most, and beyond that once what its most expensive ticket costs.
    """

    def __init__(self, quantum: int, cost: Callable[[Ticket[T]], int]) -> None:
        self._quantum = quantum
        self._cost = cost
        self._tenants: dict[str, _Tenant[T]] = {}
        self._by_order: dict[int, _Tenant[T]] = {}
        self._heap: list[tuple[int, int]] = []
        self._round = 0
        self._last_order = 0

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def firsts(self) -> Iterator[Ticket[T]]:
        """The first ticket of each tenant."""
        return (tenant.first for tenant in self._tenants.values())

    def add(self, ticket: Ticket[T]) -> None:
        """Let a ticket wait behind those of its tenant."""
        tenant = self._tenants.get(ticket.tenant)
        if tenant is not None:
            tenant.row[ticket] = None
            return
        self._last_order += 1
        # Not in this round, in which it may have had its turn already: one that comes back would else
        # hold up the rounds.
        tenant = _Tenant(ticket.tenant, self._last_order, self._round + 1, self._quantum)
        self._tenants[tenant.name] = self._by_order[tenant.order] = tenant
        tenant.row[ticket] = None
        self._schedule(tenant)

    def head(self) -> Ticket[T] | None:
        """Whose turn it is."""
        heap = self._heap
        while heap:
            turn, order = heap[0]
            tenant = self._by_order.get(order)
            if tenant is not None and tenant.turn == turn:
                return tenant.first
            heapq.heappop(heap)
        return None

    def some(self, count: int) -> Iterator[Ticket[T]]:
        """The first tickets of up to `count` tenants, then the `count` behind each of these."""
        tenants = list(islice(self._tenants.values(), count))
        yield from (tenant.first for tenant in tenants)
        for tenant in tenants:
            yield from islice(tenant.row, 1, count)

    def take(self, ticket: Ticket[T]) -> None:
        """Remove a ticket that is served: the head, or one that is let past it, whose tenant pays all the
        same."""
        tenant = self._tenants[ticket.tenant]
        if self.head() is ticket:
            self._round = tenant.turn
        tenant.credit -= self._cost_of(ticket)
        if tenant.first is ticket:
            self._drop(tenant, ticket)
        else:
            # The first one keeps its turn: those after it wait for what this one has cost.
            del tenant.row[ticket]

    def remove(self, ticket: Ticket[T]) -> None:
        """Remove a ticket that is not served. What its tenant has saved for it, it keeps."""
        tenant = self._tenants[ticket.tenant]
        if tenant.first is not ticket:
            del tenant.row[ticket]
            return
        # Back to what it has by now: the rounds until its turn may be too many for its next ticket.
        ahead = max(0, tenant.turn - self._round)
        tenant.credit -= ahead * self._quantum
        tenant.turn -= ahead
        self._drop(tenant, ticket)

    def _drop(self, tenant: _Tenant[T], ticket: Ticket[T]) -> None:
        del tenant.row[ticket]
        if tenant.row:
            self._schedule(tenant)
            return
        del self._tenants[tenant.name], self._by_order[tenant.order]
        if not self._tenants:
            self._heap.clear()
            self._round = self._last_order = 0

    def _schedule(self, tenant: _Tenant[T]) -> None:
        """Find the round in which `tenant` can pay for its first ticket."""
        missing = self._cost_of(tenant.first) - tenant.credit
        if missing > 0:
            rounds = -(-missing // self._quantum)
            tenant.turn += rounds
            tenant.credit += rounds * self._quantum
        heapq.heappush(self._heap, (tenant.turn, tenant.order))
        if len(self._heap) > 2 * len(self._tenants) + _SLACK:
            self._heap = [(each.turn, each.order) for each in self._tenants.values()]
            heapq.heapify(self._heap)

    def _cost_of(self, ticket: Ticket[T]) -> int:
        if ticket.cost is None:
            ticket.cost = max(1, self._cost(ticket))
        return ticket.cost
