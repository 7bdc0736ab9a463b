"""Whether a sequence that failed with an internal error speaks against its engine or against its request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from catenary.resume import fingerprint
from catenary.v1 import common_pb2
from services.router.dispatch.health import EngineHealth
from services.router.fleet import Engine, Fleet

# Requests that failed; each takes about 200 bytes. Beyond it the ones that failed longest ago are forgotten,
# whose next failure counts as a first one: the number bounds memory, and no operator needs another.
_MAX_REMEMBERED = 1024


@dataclass(slots=True)
class _Fault:
    """The failure of requests in one step of an engine. `counts`: it stands against the engine."""

    engine: Engine
    at: float
    counts: bool


@dataclass(slots=True)
class _Failing:
    """A request that failed: where first, and until when that is remembered."""

    first: _Fault
    until: float


class Blame:
    """Decides that by where the same request fails.

    The first failure of a request counts against its engine, once for all requests that failed in the same
    step; the same request failing there again tells nothing new. A request that fails on a second engine has
    earned both failures: nothing counts, and what counted against the first engine is taken back. Nor does
    anything count where no other engine of the model is available: to give this one nothing would hold up
    the requests that it can answer. An engine of any role is another one, since an engine for prompts
    computes whole sequences where there is no other (`HalvesPlacer`).

    A request is remembered for the breaker's window from its last failure on: as long as a fault counts, and
    as long as the request goes on failing.

    `clock`: monotonic, in seconds.
    """

    def __init__(self, fleet: Fleet, health: EngineHealth, *, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._health = health
        self._clock = clock
        # By the fingerprint of each request, the one that failed last at the end.
        self._known: OrderedDict[bytes, _Failing] = OrderedDict()

    def failed(self, engine: Engine, specs: Iterable[common_pb2.SequenceSpec]) -> None:
        """The engine failed these sequences, at least one, in one step."""
        now = self._clock()
        self._forget(now)
        names = [fingerprint(spec) for spec in specs]
        known = [failing.first for name in names if (failing := self._known.get(name)) is not None]
        elsewhere = [fault for fault in known if fault.engine.breaker is not engine.breaker]
        for fault in elsewhere:
            if fault.counts:
                fault.counts = False
                self._health.acquitted(fault.engine, fault.at)
        counts = not known and self._replaceable(engine)
        fault = _Fault(engine, self._health.failed(engine) if counts else now, counts)
        for name in names:
            # Where it failed first stays known: from there on it speaks against no engine.
            failing = self._known.setdefault(name, _Failing(fault, now))
            failing.until = now + engine.breaker.window_s
            self._known.move_to_end(name)
        while len(self._known) > _MAX_REMEMBERED:
            self._known.popitem(last=False)

    def _replaceable(self, engine: Engine) -> bool:
        return any(
            one is not engine and one.available and one.model.name == engine.model.name for one in self._fleet
        )

    def _forget(self, now: float) -> None:
        # All engines of a router have one window: the request that failed longest ago is forgotten first.
        while self._known and next(iter(self._known.values())).until < now:
            self._known.popitem(last=False)
