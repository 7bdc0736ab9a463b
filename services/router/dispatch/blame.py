"""Whether a sequence that failed with an internal error speaks against its engine or against its request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from catenary.resume import fingerprint
from catenary.v1 import common_pb2
from services.router.dispatch.health import EngineHealth
from services.router.fleet import Engine, Fleet

MAX_REMEMBERED = 1024
REMEMBERED_S = 300.0


@dataclass(slots=True)
class _Fault:
    """Requests that failed together on an engine. `counts`: it stands against the engine."""

    engine: Engine
    at: float
    counts: bool


class Blame:
    """Decides that by where the same request fails.

    The first failure of a request counts against its engine, once for all requests that failed in the same
    step; the same request failing there again tells nothing new. A request that fails on a second engine has
    earned both failures: nothing counts, and what counted against the first engine is taken back. Nor does
    anything count where no other engine could be given what this one is not: to give it nothing would hold up
    the requests that it can answer, for nothing.

    `clock`: monotonic, in seconds.
    """

    def __init__(self, fleet: Fleet, health: EngineHealth, *, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._health = health
        self._clock = clock
        # By the fingerprint of each request, the one that failed last at the end.
        self._known: OrderedDict[bytes, _Fault] = OrderedDict()

    def failed(self, engine: Engine, specs: Iterable[common_pb2.SequenceSpec]) -> None:
        """The engine failed these sequences, at least one, in one step."""
        now = self._clock()
        self._forget(now)
        names = [fingerprint(spec) for spec in specs]
        known = [fault for name in names if (fault := self._known.get(name)) is not None]
        elsewhere = [fault for fault in known if fault.engine.breaker is not engine.breaker]
        for fault in elsewhere:
            if fault.counts:
                fault.counts = False
                self._health.acquitted(fault.engine, fault.at)
        counts = not known and self._replaceable(engine)
        fault = _Fault(engine, self._health.failed(engine) if counts else now, counts)
        for name in names:
            # Where it failed first stays known: from there on it speaks against no engine.
            self._known.setdefault(name, fault)
            self._known.move_to_end(name)
        while len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)

    def _replaceable(self, engine: Engine) -> bool:
        return any(
            one is not engine and one.available and one.does(None) and one.model.name == engine.model.name
            for one in self._fleet
        )

    def _forget(self, now: float) -> None:
        for name in [name for name, fault in self._known.items() if now - fault.at > REMEMBERED_S]:
            del self._known[name]
