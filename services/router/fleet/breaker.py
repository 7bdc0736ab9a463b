"""Circuit breaker of one engine: after several faults it is given nothing for a time, then one sequence.

The breakers of engines that left are kept: an engine that attaches again under its name gets its own.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from enum import Enum


class BreakerState(Enum):
    """Whether an engine is given sequences."""

    CLOSED = "closed"
    # Nothing.
    OPEN = "open"
    # One, on which it depends.
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerOptions:
    """When it opens and for how long. Times are seconds."""

    faults: int = 3
    window_s: float = 300.0
    open_s: float = 5.0
    open_max_s: float = 60.0


class Breaker:
    """Counts faults of the engine itself, never errors that a request earned. Times are of any steady clock.

    Each sequence that ends well takes one fault off, so an engine that mostly works is not closed off. The
    time that it stays open doubles with each probe that failed.
    """

    __slots__ = ("_faults", "_first_step", "_openings", "_options", "_until", "state")

    def __init__(self, options: BreakerOptions) -> None:
        self._options = options
        self._faults: deque[float] = deque(maxlen=options.faults)
        self._openings = 0
        self._until = 0.0
        self._first_step: float | None = None
        self.state = BreakerState.CLOSED

    @property
    def window_s(self) -> float:
        """Seconds for which a fault counts."""
        return self._options.window_s

    def failed(self, now: float) -> bool:
        """Count a fault of the engine or of its link. Returns whether the breaker opens."""
        if self.state is BreakerState.OPEN:
            return False
        self._expire(now)
        self._faults.append(now)
        if self.state is BreakerState.CLOSED and len(self._faults) < self._options.faults:
            return False
        self.state = BreakerState.OPEN
        wait_s = self._options.open_s * 2 ** min(self._openings, 16)
        self._until = now + min(wait_s, self._options.open_max_s)
        self._openings += 1
        return True

    def succeeded(self) -> bool:
        """Count a sequence that ended well. Returns whether the breaker closes."""
        if self.state is BreakerState.HALF_OPEN:
            self._close()
            return True
        if self.state is BreakerState.CLOSED and self._faults:
            self._faults.popleft()
        return False

    def acquitted(self, at: float) -> bool:
        """Take back the fault of time `at`. Returns whether the breaker closes, as it would not have opened.

        Nothing changes if it does not count any more, or never did: faults of an open breaker do not.
        """
        if at not in self._faults:
            return False
        self._faults.remove(at)
        if self.state is BreakerState.CLOSED or len(self._faults) >= self._options.faults:
            return False
        self._openings -= 1
        if self._openings:
            # A probe failed by itself after an opening that was right: there may be another one.
            self._until = 0.0
            return False
        self.state = BreakerState.CLOSED
        return True

    def stepped(self, now: float) -> bool:
        """Count a step. Returns whether the breaker closes: its probe has run for long enough."""
        if self.state is not BreakerState.HALF_OPEN:
            return False
        if self._first_step is None:
            self._first_step = now
        if now - self._first_step < self._options.open_s:
            return False
        self._close()
        return True

    def tick(self, now: float) -> bool:
        """Take the time. Returns whether a probe may be sent from here on."""
        if self.state is not BreakerState.OPEN or now < self._until:
            return False
        self.state = BreakerState.HALF_OPEN
        self._first_step = None
        return True

    def remembers(self, now: float) -> bool:
        """Whether it differs from a new one."""
        self._expire(now)
        return self.state is not BreakerState.CLOSED or bool(self._faults)

    def _expire(self, now: float) -> None:
        while self._faults and now - self._faults[0] > self._options.window_s:
            self._faults.popleft()

    def _close(self) -> None:
        self.state = BreakerState.CLOSED
        self._openings = 0
        self._faults.clear()


# Names of engines that left. Only engines with the secret can attach, so this is no limit for an operator.
MAX_REMEMBERED = 1024


class Breakers:
    """Hands a breaker to each attachment.

    An instance id is new with each start, so an engine is known by its name: one that crashes and attaches
    again each second must not begin with a clean record. Engines that share a name each have one of
    their own.
    """

    def __init__(self, options: BreakerOptions) -> None:
        self._options = options
        # Of engines that are not attached, by name, the one that left last at the end.
        self._spare: OrderedDict[str, list[Breaker]] = OrderedDict()

    def take(self, name: str, now: float) -> Breaker:
        """Return the breaker for an engine of this name that attaches."""
        spare = self._spare.get(name)
        if not spare:
            return Breaker(self._options)
        breaker = spare.pop()
        if not spare:
            del self._spare[name]
        breaker.tick(now)
        return breaker

    def give_back(self, name: str, breaker: Breaker, now: float) -> None:
        """Keep the breaker of an engine that left, for the engines that left last."""
        if not breaker.remembers(now):
            return
        self._spare.setdefault(name, []).append(breaker)
        self._spare.move_to_end(name)
        while sum(map(len, self._spare.values())) > MAX_REMEMBERED:
            self._spare.popitem(last=False)
