"""The queue of one model: its lanes within their bounds, their rates, and the refusals that follow.

How fast a lane empties gives the time after which a refused client may come again. Classes and tenants
without room to wait are told to the gateways, which then shed that load themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic

from catenary.v1 import common_pb2, router_pb2
from services.router.admission.guard import Places
from services.router.admission.lanes import CLASSES, LANE_NAMES, LANES, Lanes, T, Ticket
from services.router.admission.refusals import Refused

WINDOW_S = 20.0
_SLOTS = 20


class DrainRate:
    """Units (sequences or tokens) per second that left a lane for engines, over the last WINDOW_S seconds."""

    def __init__(self) -> None:
        # Of each slot in which there was anything: its number and its units.
        self._slots: deque[list[int]] = deque()
        self._sum = 0
        self._began: float | None = None

    def watch(self, now: float) -> None:
        """Something waits: from here on, that nothing leaves says something too."""
        if self._began is None:
            self._began = now

    def rest(self) -> None:
        """Nothing waits any more: there is nothing to measure."""
        self._began = None
        self._slots.clear()
        self._sum = 0

    def add(self, now: float, units: int) -> None:
        """Units left."""
        slot = int(now / WINDOW_S * _SLOTS)
        if self._slots and self._slots[-1][0] == slot:
            self._slots[-1][1] += units
        else:
            self._slots.append([slot, units])
        self._sum += units
        self._trim(slot)

    def seconds(self, now: float, units: int) -> float | None:
        """How long `units` take to leave. None: it is not measured yet. Infinity: nothing leaves."""
        if self._began is None or now - self._began < WINDOW_S / _SLOTS:
            return None
        self._trim(int(now / WINDOW_S * _SLOTS))
        if not self._sum:
            return float("inf")
        return units * min(now - self._began, WINDOW_S) / self._sum

    def _trim(self, slot: int) -> None:
        while self._slots and self._slots[0][0] <= slot - _SLOTS:
            self._sum -= self._slots.popleft()[1]


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """Bounds of what waits for a model; tuples have a value for each class, the most urgent first.

    `sequences`, `tokens`: that may wait; 0 lets nothing wait. `wait_s`: longest wait. `kept_shares`: of
    places that a class keeps from lower ones. `tenant_share`: of a lane's bounds that one named tenant may
    take. `quantum`: tokens of a tenant's turn. `unserved_s`: how long after an engine served a model last
    requests for it may wait.
    """

    sequences: tuple[int, ...] = (64, 1024, 1024, 4096)
    tokens: tuple[int, ...] = (1 << 20, 1 << 22, 1 << 22, 1 << 23)
    wait_s: tuple[float, ...] = (10.0, 30.0, 60.0, 600.0)
    kept_shares: tuple[float, ...] = (0.02, 0.03, 0.05)
    tenant_share: float = 0.5
    promote_after_s: float = 10.0
    quantum: int = 2048
    unserved_s: float = 30.0
    retry_after_ms: int = 1000
    max_retry_after_ms: int = 60_000


@dataclass(slots=True)
class Held:
    """The waiting tickets of a lane, or of one tenant there."""

    sequences: int = 0
    tokens: int = 0

    def add(self, ticket: Ticket[T], sign: int = 1) -> None:
        """Count a ticket in, or out with -1."""
        self.sequences += sign * ticket.sequences
        self.tokens += sign * ticket.tokens


class ModelQueue(Generic[T]):
    """Counts by a ticket's home lane, in sequences and tokens; serves as `Lanes` does."""

    def __init__(self, model: str, options: QueueOptions, cost: Callable[[Ticket[T]], int]) -> None:
        self.model = model
        self.lanes: Lanes[T] = Lanes(options.quantum, cost, options.promote_after_s)
        self.places = Places(options.kept_shares)
        self.held = [Held() for _ in LANES]
        # Whether an engine serves the model, and when one was last seen to; None: never.
        self.served = False
        self.served_at: float | None = None
        # Tokens that the KV of the largest attached engine has room for; 0: none is attached.
        self.largest_kv = 0
        # The longest sequence that one of these takes, in tokens.
        self.longest = 0
        self._options = options
        self._tenants: dict[tuple[int, str], Held] = {}
        self._rates = [DrainRate() for _ in LANES]

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is placed."""
        return not any(held.sequences for held in self.held) and not any(self.places.load.placed)

    def check(self, ticket: Ticket[T], now: float) -> None:
        """Raises Refused: the lane is full, or has as much of this tenant as it may have (OVERLOADED)."""
        lane, held = ticket.home, self.held[ticket.home]
        if self._passes(ticket, held, 1.0):
            raise self._full(lane, now, self._bounds(lane, 1.0) + " of this class")
        share = self._options.tenant_share
        if ticket.tenant and self._passes(ticket, self._of_tenant(lane, ticket.tenant), share):
            raise self._full(lane, now, self._bounds(lane, share) + " of one tenant (tenant-share)")

    def add(self, ticket: Ticket[T], now: float, *, foremost: bool = False) -> None:
        """Let a ticket wait."""
        lane = ticket.home
        if not ticket.apart:
            self.lanes.add(ticket, now, foremost=foremost)
        self.held[lane].add(ticket)
        self._tenants.setdefault((lane, ticket.tenant), Held()).add(ticket)
        self._rates[lane].watch(now)

    def take(self, ticket: Ticket[T], now: float) -> None:
        """An engine has it."""
        if not ticket.apart:
            self.lanes.take(ticket)
        self._rates[ticket.home].add(now, ticket.sequences)
        self._gone(ticket)

    def remove(self, ticket: Ticket[T]) -> None:
        """It waits no longer, and no engine has it."""
        if not ticket.apart:
            self.lanes.remove(ticket)
        self._gone(ticket)

    def retry_after_ms(self, lane: int, now: float) -> int:
        """Time in which what waits in a lane leaves it, by what left lately; within the bounds that are
        set."""
        options = self._options
        seconds = self._rates[lane].seconds(now, self.held[lane].sequences)
        if seconds is None:
            return options.retry_after_ms
        return int(min(max(seconds * 1000, options.retry_after_ms), options.max_retry_after_ms))

    def lately_served(self, now: float) -> bool:
        """Whether an engine serves the model, or did so recently that it is worth waiting for the next."""
        return self.served or (
            self.served_at is not None and now - self.served_at <= self._options.unserved_s
        )

    def fullness(self, lane: int, tenant: str | None = None) -> float:
        """How much of its bounds a lane has, or of his a tenant in it; 1 is full."""
        options = self._options
        share = 1.0 if tenant is None else options.tenant_share
        held = self.held[lane] if tenant is None else self._of_tenant(lane, tenant)
        sequences, tokens = options.sequences[lane] * share, options.tokens[lane] * share
        return max(held.sequences / max(1.0, sequences), held.tokens / max(1.0, tokens))

    def tenants(self, lane: int) -> int:
        """Tenants that have something in a lane; everybody without a name is one."""
        return sum(key[0] == lane for key in self._tenants)

    def arrivals(self, lane: int) -> Iterator[float]:
        """When those came that are next, of all that came to a lane."""
        return (ticket.since for ticket in self.lanes.firsts() if ticket.home == lane)

    def waiting_tenants(self) -> list[tuple[int, str]]:
        """Lanes and names of the tenants that wait and have a name."""
        return [key for key in self._tenants if key[1]]

    def _passes(self, ticket: Ticket[T], held: Held, share: float) -> bool:
        options, lane = self._options, ticket.home
        return (
            held.sequences + ticket.sequences > options.sequences[lane] * share
            or held.tokens + ticket.tokens > options.tokens[lane] * share
        )

    def _bounds(self, lane: int, share: float) -> str:
        sequences, tokens = self._options.sequences[lane] * share, self._options.tokens[lane] * share
        return f"{sequences:.0f} sequences (lane-sequences) and {tokens:.0f} tokens (lane-tokens)"

    def _full(self, lane: int, now: float, limit: str) -> Refused:
        return Refused(
            common_pb2.ERROR_CODE_OVERLOADED,
            f"The queue of the class {LANE_NAMES[lane]} is full: its limit is {limit}. Try again later.",
            retryable=True,
            retry_after_ms=self.retry_after_ms(lane, now),
        )

    def _of_tenant(self, lane: int, tenant: str) -> Held:
        return self._tenants.get((lane, tenant)) or Held()

    def _gone(self, ticket: Ticket[T]) -> None:
        key = ticket.home, ticket.tenant
        self.held[ticket.home].add(ticket, -1)
        held = self._tenants[key]
        held.add(ticket, -1)
        if not held.sequences:
            del self._tenants[key]
        if not self.held[ticket.home].sequences:
            self._rates[ticket.home].rest()


# Of the message to the gateways, which has one entry for each model and class that is full.
MAX_ENTRIES = 64
# Once full, a queue counts as full until so much of it is left: a full one would else change at each step.
_STILL_FULL = 0.9

Key = tuple[str, int, str | None]


class Shedding:
    """The entries, and when they have to be told again: each holds only for its retry time."""

    def __init__(self) -> None:
        self._until: dict[Key, float] = {}

    def update(self, queues: Iterable[ModelQueue[T]], now: float) -> router_pb2.ShedState | None:
        """The message to send now. None: the last one still holds."""
        full: dict[Key, int] = {}
        for queue in queues:
            for key in self._full(queue):
                if len(full) < MAX_ENTRIES:
                    full[key] = queue.retry_after_ms(key[1], now)
        # What holds is told again before it has expired.
        lapses = any(until - now < full[key] / 2000 for key, until in self._until.items() if key in full)
        if full.keys() == self._until.keys() and not lapses:
            return None
        self._until = {key: now + after / 1000 for key, after in full.items()}
        return state(full)

    def _full(self, queue: ModelQueue[T]) -> Iterable[Key]:
        if not len(queue.lanes):
            return
        for lane in LANES:
            key: Key = (queue.model, lane, None)
            if queue.held[lane].sequences and queue.fullness(lane) >= self._mark(key):
                yield key
        for lane, tenant in queue.waiting_tenants():
            key = (queue.model, lane, tenant)
            if queue.fullness(lane, tenant) >= self._mark(key):
                yield key

    def _mark(self, key: Key) -> float:
        return _STILL_FULL if key in self._until else 1.0


def state(full: dict[Key, int]) -> router_pb2.ShedState:
    """The message: retry times in milliseconds by key."""
    return router_pb2.ShedState(
        entries=[
            router_pb2.ShedEntry(
                model=model,
                priority_class=CLASSES[lane],
                tenant=tenant,
                code=common_pb2.ERROR_CODE_OVERLOADED,
                retry_after_ms=after,
            )
            for (model, lane, tenant), after in full.items()
        ]
    )
