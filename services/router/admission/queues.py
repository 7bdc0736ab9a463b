"""The admission queues, one for each model: bounds, rates, deadlines, counts, and the load that is shed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from catenary.v1 import common_pb2, router_pb2
from services.router.admission.guard import ClassQuota
from services.router.admission.lanes import CLASSES, LANE_NAMES, LANES, Lanes, QueuedSequence, T, lane_of
from services.router.admission.validation import Refused, does_not_fit, not_served, sequences_of, too_late
from services.router.fleet import Engine

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
        """Start measuring: something waits."""
        if self._began is None:
            self._began = now

    def rest(self) -> None:
        """Stop measuring: nothing waits."""
        self._began = None
        self._slots.clear()
        self._sum = 0

    def add(self, now: float, units: int) -> None:
        """Count units that left."""
        slot = int(now / WINDOW_S * _SLOTS)
        if self._slots and self._slots[-1][0] == slot:
            self._slots[-1][1] += units
        else:
            self._slots.append([slot, units])
        self._sum += units
        self._trim(slot)

    def seconds(self, now: float, units: int) -> float | None:
        """Return the time in which `units` leave: None before it is measured, infinity if nothing leaves."""
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

    `sequences`, `tokens`: that may wait; with 0, nothing may. `wait_s`: longest wait. `reserved_shares`: of
    places that a class reserves against lower ones. `tenant_share`: of a lane's bounds that a named tenant
    may take. `quantum`: tokens of a tenant's turn. `unserved_s`: how long after an engine served a model last
    requests for it may wait.
    """

    sequences: tuple[int, ...] = (64, 1024, 1024, 4096)
    tokens: tuple[int, ...] = (1 << 20, 1 << 22, 1 << 22, 1 << 23)
    wait_s: tuple[float, ...] = (10.0, 30.0, 60.0, 600.0)
    reserved_shares: tuple[float, ...] = (0.02, 0.03, 0.05)
    tenant_share: float = 0.5
    promote_after_s: float = 10.0
    quantum: int = 2048
    unserved_s: float = 30.0
    retry_after_ms: int = 1000
    max_retry_after_ms: int = 60_000


@dataclass(slots=True)
class Held:
    """The waiting entries of a lane, or of one tenant there."""

    sequences: int = 0
    tokens: int = 0

    def add(self, entry: QueuedSequence[T], sign: int = 1) -> None:
        """Count an entry in, or out with -1."""
        self.sequences += sign * entry.sequences
        self.tokens += sign * entry.tokens


class ModelQueue(Generic[T]):
    """Counts by an entry's home lane, in sequences and tokens; serves as `Lanes` does."""

    def __init__(self, model: str, options: QueueOptions, cost: Callable[[QueuedSequence[T]], int]) -> None:
        self.model = model
        self.lanes: Lanes[T] = Lanes(options.quantum, cost, options.promote_after_s)
        self.quota = ClassQuota(options.reserved_shares)
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
        """Whether nothing waits and nothing is placed."""
        return not any(held.sequences for held in self.held) and not any(self.quota.load.placed)

    def check(self, entry: QueuedSequence[T], now: float) -> None:
        """Raise Refused (OVERLOADED) if the lane is full, or has as much of this tenant as it may have."""
        lane, held = entry.home, self.held[entry.home]
        if self._passes(entry, held, 1.0):
            raise self._full(lane, now, self._bounds(lane, 1.0) + " of this class")
        share = self._options.tenant_share
        if entry.tenant and self._passes(entry, self._of_tenant(lane, entry.tenant), share):
            raise self._full(lane, now, self._bounds(lane, share) + " of one tenant (tenant-share)")

    def add(self, entry: QueuedSequence[T], now: float, *, foremost: bool = False) -> None:
        """Queue an entry."""
        lane = entry.home
        if not entry.apart:
            self.lanes.add(entry, now, foremost=foremost)
        self.held[lane].add(entry)
        self._tenants.setdefault((lane, entry.tenant), Held()).add(entry)
        self._rates[lane].watch(now)

    def take(self, entry: QueuedSequence[T], now: float) -> None:
        """Remove an entry that was placed."""
        if not entry.apart:
            self.lanes.take(entry)
        self._rates[entry.home].add(now, entry.sequences)
        self._gone(entry)

    def remove(self, entry: QueuedSequence[T]) -> None:
        """Remove an entry that was not placed."""
        if not entry.apart:
            self.lanes.remove(entry)
        self._gone(entry)

    def retry_after_ms(self, lane: int, now: float) -> int:
        """Return the time in which a lane empties at its recent rate, within the bounds of the options."""
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
        """Return the taken share of the bounds of a lane, or of a tenant in it; 1 is full."""
        options = self._options
        share = 1.0 if tenant is None else options.tenant_share
        held = self.held[lane] if tenant is None else self._of_tenant(lane, tenant)
        sequences, tokens = options.sequences[lane] * share, options.tokens[lane] * share
        return max(held.sequences / max(1.0, sequences), held.tokens / max(1.0, tokens))

    def tenants(self, lane: int) -> int:
        """Return the number of tenants in a lane; all those without a name are one."""
        return sum(key[0] == lane for key in self._tenants)

    def arrivals(self, lane: int) -> Iterator[float]:
        """Yield the arrivals of the next entries of a lane, in monotonic seconds."""
        return (entry.since for entry in self.lanes.firsts() if entry.home == lane)

    def waiting_tenants(self) -> list[tuple[int, str]]:
        """Return the lanes and names of the tenants that wait and have a name."""
        return [key for key in self._tenants if key[1]]

    def _passes(self, entry: QueuedSequence[T], held: Held, share: float) -> bool:
        options, lane = self._options, entry.home
        return (
            held.sequences + entry.sequences > options.sequences[lane] * share
            or held.tokens + entry.tokens > options.tokens[lane] * share
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

    def _gone(self, entry: QueuedSequence[T]) -> None:
        key = entry.home, entry.tenant
        self.held[entry.home].add(entry, -1)
        held = self._tenants[key]
        held.add(entry, -1)
        if not held.sequences:
            del self._tenants[key]
        if not self.held[entry.home].sequences:
            self._rates[entry.home].rest()


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
        """Return the message to send now, or None if the last one still holds."""
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
    """Return the message for retry times in milliseconds by key."""
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


H = TypeVar("H", bound=Hashable)

TICK_S = 0.05


class Deadlines(Generic[H]):
    """Things by the tick of their deadline. Adding and discarding take constant time; `due` looks at all
    ticks that have anything."""

    def __init__(self) -> None:
        self._ticks: dict[int, dict[H, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._ticks)

    def add(self, thing: H, deadline: float) -> None:
        """Add a thing that is due at `deadline`, in monotonic seconds, or up to a tick later."""
        self._ticks.setdefault(_tick(deadline), {})[thing] = None

    def discard(self, thing: H, deadline: float) -> None:
        """Remove a thing, with the deadline that it was added with. Idempotent."""
        tick = _tick(deadline)
        things = self._ticks.get(tick)
        if things is None:
            return
        things.pop(thing, None)
        if not things:
            del self._ticks[tick]

    def due(self, now: float) -> list[H]:
        """Return the due things in order; each stays until it is discarded."""
        last = now / TICK_S
        return [
            thing
            for tick in sorted(tick for tick in self._ticks if tick <= last)
            for thing in self._ticks[tick]
        ]


def _tick(deadline: float) -> int:
    """Return the first tick that is not before the deadline."""
    return -int(-deadline // TICK_S)


class RefusedFor(StrEnum):
    """Why a sequence that could have been served was refused. A closed set: it labels a metric."""

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
    return [LaneCounts() for _ in LANES]


class AdmissionQueues(Generic[T]):
    """Holds entries; the caller decides which entry an engine gets. `cost`: see FairQueue."""

    def __init__(self, options: QueueOptions, cost: Callable[[QueuedSequence[T]], int]) -> None:
        self._options = options
        self._cost = cost
        self._queues: dict[str, ModelQueue[T]] = {}
        self._deadlines: Deadlines[QueuedSequence[T]] = Deadlines()
        self._count = 0
        self.counts = lane_counts()

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[ModelQueue[T]]:
        """Yield the queues of models that were served lately, or of which something is here."""
        return iter(self._queues.values())

    def queue_of(self, model: str) -> ModelQueue[T]:
        """Return the queue of a model, made if there is none."""
        queue = self._queues.get(model)
        if queue is None:
            queue = self._queues[model] = ModelQueue(model, self._options, self._cost)
        return queue

    def entry(
        self, item: T, spec: common_pb2.SequenceSpec, now: float, *, first: bool, apart: bool
    ) -> QueuedSequence[T]:
        """Return the entry of a sequence that arrives now; it does not wait yet."""
        lane = lane_of(spec)
        wait_s = self._options.wait_s[lane]
        if spec.HasField("max_wait_ms"):
            wait_s = min(wait_s, spec.max_wait_ms / 1000)
        return QueuedSequence(
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

    def check(self, entry: QueuedSequence[T], kv_tokens: int, now: float, *, served: bool) -> None:
        """Check that a new sequence may wait. `kv_tokens`: that it needs; `served`: its model is served.

        Raises:
            Refused: it would wait in vain, or its queue is full. Counted if an engine could ever hold it.
        """
        lane, queue = entry.home, self.queue_of(entry.model)
        if kv_tokens > queue.largest_kv > 0:
            raise does_not_fit(kv_tokens, queue.largest_kv)
        if not queue.lately_served(now):
            self.count_refusal(lane, RefusedFor.NOT_SERVED)
            raise self._not_served()
        if entry.deadline <= now:
            self.count_refusal(lane, RefusedFor.WAITED_TOO_LONG)
            raise too_late(entry.deadline - entry.since, queue.retry_after_ms(lane, now))
        if entry.first:
            return
        try:
            queue.check(entry, now)
        except Refused:
            self.count_refusal(lane, RefusedFor.QUEUE_FULL if served else RefusedFor.NOT_SERVED)
            if not served:
                raise self._not_served() from None
            raise

    def refuse_expired(self, entry: QueuedSequence[T], now: float) -> common_pb2.Error:
        """Count a sequence that has waited too long; return its error: no room in time, or no engine."""
        queue = self.queue_of(entry.model)
        if not queue.served:
            self.count_refusal(entry.home, RefusedFor.NOT_SERVED)
            return self._not_served().error
        self.count_refusal(entry.home, RefusedFor.WAITED_TOO_LONG)
        return too_late(entry.deadline - entry.since, queue.retry_after_ms(entry.home, now)).error

    def add(self, entry: QueuedSequence[T], now: float, *, foremost: bool = False) -> None:
        """Queue an entry without a check of bounds. `foremost`: in front of its lane."""
        entry.waits = True
        self._count += entry.sequences
        self._deadlines.add(entry, entry.deadline)
        self.queue_of(entry.model).add(entry, now, foremost=foremost)

    def take(self, entry: QueuedSequence[T], now: float) -> None:
        """Count a sequence as placed, whether it waited or not."""
        if entry.waits:
            self._leave(entry)
            self._queues[entry.model].take(entry, now)
        if not entry.admitted:
            entry.admitted = True
            self.counts[entry.home].admitted += 1

    def remove(self, entry: QueuedSequence[T]) -> None:
        """Remove an entry that is not placed. Idempotent."""
        if not entry.waits:
            return
        self._leave(entry)
        self._queues[entry.model].remove(entry)

    def count_refusal(self, lane: int, reason: RefusedFor) -> None:
        self.counts[lane].refused[reason] += 1

    def due(self, now: float) -> list[QueuedSequence[T]]:
        """Return the entries whose deadline is over."""
        return self._deadlines.due(now)

    def entries(self) -> list[QueuedSequence[T]]:
        """Return all entries in the order of their deadlines."""
        return self._deadlines.due(float("inf"))

    def promote(self, now: float) -> None:
        """Promote the entries that have waited long in their lane."""
        for queue in self._queues.values():
            for entry in queue.lanes.promote(now):
                self.counts[entry.home].promoted += 1

    def refresh(self, engines: Iterable[Engine], now: float, knows: Callable[[str], bool]) -> None:
        """Look at the engines: how many places there are, and which models are served.

        An empty queue of a model that is forgotten (`knows`) is dropped.
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
            queue.quota.update(*places.get(name, (0, 0)))
            queue.largest_kv = largest.get(name, 0)
            queue.longest = longest.get(name, 0)

    def views(self, now: float) -> list[LaneView]:
        """Return the lanes over all models."""
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
            live_sequences=sum(queue.quota.load.placed[lane] for queue in queues),
        )

    def _not_served(self) -> Refused:
        # How fast a lane empties says nothing of when an engine comes.
        return not_served(self._options.retry_after_ms)

    def _leave(self, entry: QueuedSequence[T]) -> None:
        entry.waits = False
        self._count -= entry.sequences
        self._deadlines.discard(entry, entry.deadline)
