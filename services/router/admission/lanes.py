"""The queues of one model: four lanes, each with its tenants, and promotion between them.

Tenants take turns: deficit round robin, by Shreedhar and Varghese (SIGCOMM 1995). Each round, every tenant
that waits may spend one quantum of tokens more, in a fixed order; what it cannot spend because its next
entry costs more, it keeps. Rounds in which no tenant can spend are not gone through: each tenant knows in
which round it can pay for its first entry, and a heap holds the next. A decision costs the logarithm of the
number of tenants that wait, whatever entries cost.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Generic, TypeVar

from catenary.v1 import common_pb2

T = TypeVar("T")

# In the order in which they are served. Code works with indexes into this.
CLASSES = (
    common_pb2.PRIORITY_CLASS_SYSTEM,
    common_pb2.PRIORITY_CLASS_INTERACTIVE,
    common_pb2.PRIORITY_CLASS_DEFAULT,
    common_pb2.PRIORITY_CLASS_BULK,
)
LANE_NAMES = ("system", "interactive", "default", "bulk")
LANES = range(len(CLASSES))
SYSTEM, INTERACTIVE, DEFAULT, BULK = LANES


def lane_of(spec: common_pb2.SequenceSpec) -> int:
    """Return the lane of a valid spec."""
    wanted = spec.priority_class
    return DEFAULT if wanted == common_pb2.PRIORITY_CLASS_UNSPECIFIED else CLASSES.index(wanted)


@dataclass(slots=True, eq=False)
class QueuedSequence(Generic[T]):
    """A sequence that waits. `home`: the lane of its arrival, by which it counts; promotion changes `lane`.

    Times are monotonic seconds: `since` its arrival, `entered` its arrival in `lane`, `deadline` when it is
    refused. `cost`: tokens by which tenants take turns, known once it is the first of its tenant. `apart`: it
    counts in its lane but waits in none, as it is in quarantine. `admitted`: it was placed once.
    """

    item: T
    model: str
    home: int
    tenant: str
    tokens: int
    sequences: int
    since: float
    deadline: float
    # In front of its lane, whatever its tenant: it was admitted before.
    first: bool = False
    apart: bool = False
    waits: bool = False
    admitted: bool = False
    lane: int = -1
    entered: float = 0.0
    cost: int | None = None


Row = OrderedDict[QueuedSequence[T], None]


# Stale entries of the heap beyond twice the tenants are cleared away.
_SLACK = 16


class _Tenant(Generic[T]):
    """Entries of a tenant in their order. `credit`: tokens that it may spend in round `turn`."""

    __slots__ = ("credit", "name", "order", "row", "turn")

    def __init__(self, name: str, order: int, turn: int, quantum: int) -> None:
        self.name = name
        self.order = order
        self.turn = turn
        self.credit = quantum
        self.row: Row[T] = OrderedDict()

    @property
    def first(self) -> QueuedSequence[T]:
        return next(iter(self.row))


class FairQueue(Generic[T]):
    """Entries of one lane. First come, first served within a tenant; a tenant without entries is forgotten.

    `quantum`: tokens of a turn. `cost`: asked once for each entry, when it is the first of its tenant.

    A tenant whose first entry costs c is served after at most ceil(c / quantum) + 1 rounds, in each of which
    another one gets a quantum at the most, and beyond that once what its most expensive entry costs.
    """

    def __init__(self, quantum: int, cost: Callable[[QueuedSequence[T]], int]) -> None:
        self._quantum = quantum
        self._cost = cost
        self._tenants: dict[str, _Tenant[T]] = {}
        self._by_order: dict[int, _Tenant[T]] = {}
        self._heap: list[tuple[int, int]] = []
        self._round = 0
        self._last_order = 0

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def firsts(self) -> Iterator[QueuedSequence[T]]:
        """Yield the first entry of each tenant."""
        return (tenant.first for tenant in self._tenants.values())

    def add(self, entry: QueuedSequence[T]) -> None:
        """Queue an entry behind those of its tenant."""
        tenant = self._tenants.get(entry.tenant)
        if tenant is not None:
            tenant.row[entry] = None
            return
        self._last_order += 1
        # Not in this round, in which it may have had its turn already: one that comes back would else
        # hold up the rounds.
        tenant = _Tenant(entry.tenant, self._last_order, self._round + 1, self._quantum)
        self._tenants[tenant.name] = self._by_order[tenant.order] = tenant
        tenant.row[entry] = None
        self._schedule(tenant)

    def head(self) -> QueuedSequence[T] | None:
        """Return the entry whose turn it is, or None without entries."""
        heap = self._heap
        while heap:
            turn, order = heap[0]
            tenant = self._by_order.get(order)
            if tenant is not None and tenant.turn == turn:
                return tenant.first
            heapq.heappop(heap)
        return None

    def some(self, count: int) -> Iterator[QueuedSequence[T]]:
        """Yield the first entries of up to `count` tenants, then up to `count` behind each of these."""
        tenants = list(islice(self._tenants.values(), count))
        yield from (tenant.first for tenant in tenants)
        for tenant in tenants:
            yield from islice(tenant.row, 1, count)

    def take(self, entry: QueuedSequence[T]) -> None:
        """Remove a served entry: the head, or one that overtakes it, whose tenant pays all the same."""
        tenant = self._tenants[entry.tenant]
        if self.head() is entry:
            self._round = tenant.turn
        tenant.credit -= self._cost_of(entry)
        if tenant.first is entry:
            self._drop(tenant, entry)
        else:
            # The first one keeps its turn: those after it wait for what this one has cost.
            del tenant.row[entry]

    def remove(self, entry: QueuedSequence[T]) -> None:
        """Remove an entry that is not served. What its tenant has saved for it, it keeps."""
        tenant = self._tenants[entry.tenant]
        if tenant.first is not entry:
            del tenant.row[entry]
            return
        # Back to what it has by now: the rounds until its turn may be too many for its next entry.
        ahead = max(0, tenant.turn - self._round)
        tenant.credit -= ahead * self._quantum
        tenant.turn -= ahead
        self._drop(tenant, entry)

    def check(self) -> None:
        """Compare the books; visits every tenant. Raise ValueError if they differ or stale turns pile up."""
        tenants, turns = self._tenants, set(self._heap)
        if list(self._by_order.values()) != list(tenants.values()):
            raise ValueError("the tenants by name and by order differ")
        if not all(each.row and (each.turn, each.order) in turns for each in tenants.values()):
            raise ValueError("a tenant waits for nothing, or has no turn")
        if len(self._heap) > (2 * len(tenants) + _SLACK if tenants else 0):
            raise ValueError("stale turns are not cleared away")

    def _drop(self, tenant: _Tenant[T], entry: QueuedSequence[T]) -> None:
        del tenant.row[entry]
        if tenant.row:
            self._schedule(tenant)
            return
        del self._tenants[tenant.name], self._by_order[tenant.order]
        if not self._tenants:
            self._heap.clear()
            self._round = self._last_order = 0

    def _schedule(self, tenant: _Tenant[T]) -> None:
        """Find the round in which `tenant` can pay for its first entry."""
        missing = self._cost_of(tenant.first) - tenant.credit
        if missing > 0:
            rounds = -(-missing // self._quantum)
            tenant.turn += rounds
            tenant.credit += rounds * self._quantum
        heapq.heappush(self._heap, (tenant.turn, tenant.order))
        if len(self._heap) > 2 * len(self._tenants) + _SLACK:
            self._heap = [(each.turn, each.order) for each in self._tenants.values()]
            heapq.heapify(self._heap)

    def _cost_of(self, entry: QueuedSequence[T]) -> int:
        if entry.cost is None:
            entry.cost = max(1, self._cost(entry))
        return entry.cost


class Lanes(Generic[T]):
    """Entries by lane. In a lane, those marked `first` come before the tenants' turns.

    The first entry of a tenant that has waited in its lane for `promote_after_s` moves up one lane, but not
    into SYSTEM, and only when the one that moved before it is gone: a tenant that lets thousands wait in a
    low lane has one at a time in the next.
    """

    def __init__(
        self, quantum: int, cost: Callable[[QueuedSequence[T]], int], promote_after_s: float
    ) -> None:
        self._promote_after_s = promote_after_s
        self._fronts: list[Row[T]] = [OrderedDict() for _ in LANES]
        self._queues: list[FairQueue[T]] = [FairQueue(quantum, cost) for _ in LANES]
        # By lane that they were promoted to, and tenant.
        self._promoted: dict[tuple[int, str], QueuedSequence[T]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def firsts(self) -> Iterator[QueuedSequence[T]]:
        """Yield the next entry of each tenant in each lane, and the first of those in front."""
        for front, queue in zip(self._fronts, self._queues, strict=True):
            yield from islice(front, 1)
            yield from queue.firsts()

    def add(self, entry: QueuedSequence[T], now: float, *, foremost: bool = False) -> None:
        """Queue an entry in its home lane. `foremost`: before all others there, even those marked `first`."""
        self._count += 1
        self._enter(entry, entry.home, now)
        if foremost:
            self._fronts[entry.lane].move_to_end(entry, last=False)

    def heads(self) -> Iterator[QueuedSequence[T]]:
        """Yield the next entry of each lane, the most urgent lane first."""
        for lane in LANES:
            if (head := self.head(lane)) is not None:
                yield head

    def head(self, lane: int) -> QueuedSequence[T] | None:
        """Return the next entry of a lane, or None."""
        front = self._fronts[lane]
        return next(iter(front)) if front else self._queues[lane].head()

    def behind(self, head: QueuedSequence[T], count: int) -> Iterator[QueuedSequence[T]]:
        """Yield entries other than `head`, the most urgent lanes first; of each lane `count` or more."""
        for front, queue in zip(self._fronts, self._queues, strict=True):
            found = chain(islice(front, count), queue.some(count))
            yield from (entry for entry in found if entry is not head)

    def take(self, entry: QueuedSequence[T]) -> None:
        """Remove an entry that is served: the head of a lane, or one that overtakes it."""
        self._count -= 1
        self._unpromoted(entry)
        if entry in self._fronts[entry.lane]:
            del self._fronts[entry.lane][entry]
        else:
            self._queues[entry.lane].take(entry)

    def remove(self, entry: QueuedSequence[T]) -> None:
        """Remove any entry, which is not served."""
        self._count -= 1
        self._leave(entry)

    def blocked(self, lane: int, *, first: bool) -> bool:
        """Whether something waits that comes before a new entry of `lane`, or of its front."""
        if not self._count:
            return False
        if any(self._fronts[each] or self._queues[each] for each in range(lane)):
            return True
        return bool(self._fronts[lane] or (self._queues[lane] and not first))

    def promote(self, now: float) -> list[QueuedSequence[T]]:
        """Move up the entries that have waited long, and return them."""
        moved = []
        # From the top, so that nothing moves twice at once.
        for lane in range(INTERACTIVE + 1, len(LANES)):
            firsts = [*self._queues[lane].firsts(), *list(self._fronts[lane])[:1]]
            for entry in firsts:
                if now - entry.entered < self._promote_after_s:
                    continue
                if (lane - 1, entry.tenant) in self._promoted:
                    continue
                self._leave(entry)
                self._enter(entry, lane - 1, now)
                self._promoted[lane - 1, entry.tenant] = entry
                moved.append(entry)
        return moved

    def _enter(self, entry: QueuedSequence[T], lane: int, now: float) -> None:
        entry.lane, entry.entered = lane, now
        if entry.first:
            self._fronts[lane][entry] = None
        else:
            self._queues[lane].add(entry)

    def _leave(self, entry: QueuedSequence[T]) -> None:
        self._unpromoted(entry)
        if entry in self._fronts[entry.lane]:
            del self._fronts[entry.lane][entry]
        else:
            self._queues[entry.lane].remove(entry)

    def _unpromoted(self, entry: QueuedSequence[T]) -> None:
        key = entry.lane, entry.tenant
        if self._promoted.get(key) is entry:
            del self._promoted[key]
