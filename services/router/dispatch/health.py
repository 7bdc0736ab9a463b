"""The health of engines, and the requests that harm them.

Faults and good ends go to an engine's breaker, steps end a stall. A sequence that failed with an internal
error speaks against its engine or against its request, and requests are blamed for an engine's death.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from catenary.resume import POISONED, PoisonedRequests, fingerprint
from catenary.telemetry import get_logger
from catenary.v1 import common_pb2
from services.router.admission import Refused
from services.router.dispatch.sequence import LiveSequence
from services.router.fleet import Engine, Fleet
from services.router.metrics import RouterMetrics

_log = get_logger(__name__)


class EngineHealth:
    """Tells the breakers of faults and steps. `on_change`: called when other engines are available."""

    def __init__(
        self,
        metrics: RouterMetrics,
        *,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._on_change = on_change
        self._clock = clock

    def failed(self, engine: Engine) -> float:
        """Count a fault: a broken link, a dead core, or a failed sequence that Blame puts on the engine.

        An engine that drains has no faults.

        Returns:
            The time of the fault, for `acquitted`.
        """
        now = self._clock()
        if engine.leaving or not engine.breaker.failed(now):
            return now
        engine.touch()
        self._metrics.breaker_openings.inc()
        _log.warning("engine is given nothing for a time: too many faults", engine=engine.name)
        self._on_change()
        return now

    def acquitted(self, engine: Engine, at: float) -> None:
        """Take back the fault of time `at`, which was not the engine's."""
        if engine.breaker.acquitted(at):
            self._closed(engine)

    def succeeded(self, engine: Engine) -> None:
        """Count a sequence that an engine ended well."""
        if engine.breaker.succeeded():
            self._closed(engine)

    def stepped(self, engine: Engine) -> None:
        """Count a step of an engine: it is not stalled."""
        now = self._clock()
        was_stalled = engine.stalled
        engine.stepped(now)
        if engine.breaker.stepped(now):
            self._closed(engine)
        elif was_stalled:
            self._on_change()

    def got_work(self, engine: Engine) -> None:
        """Start an engine's time to make a step, as it gets its first sequence."""
        engine.progress_at = self._clock()

    def sweep(self, engines: Iterable[Engine]) -> None:
        """Let probes through to engines that were closed off for long enough."""
        now = self._clock()
        probed = [engine for engine in engines if engine.breaker.tick(now)]
        for engine in probed:
            engine.touch()
        if probed:
            self._on_change()

    def _closed(self, engine: Engine) -> None:
        engine.touch()
        _log.info("engine is well again", engine=engine.name)
        self._on_change()


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
    """Decides whether a failed sequence counts against its engine, by where the same request fails.

    The first failure of a request counts against its engine, once for all requests that failed in the same
    step; the same request failing there again tells nothing new. A request that fails on a second engine has
    earned both failures: nothing counts, and what counted against the first engine is taken back. Nor does
    anything count where no other engine of the model is available: to give this one nothing would hold up
    the requests that it can answer. An engine of any role is another one, since an engine for prompts
    computes whole sequences where there is no other (`SplitPlacer`).

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
        """Count the failure of sequences, at least one, in one step of an engine."""
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


ENGINE_LEFT = common_pb2.Error(
    code=common_pb2.ERROR_CODE_DRAINING, message="The engine that ran the request has left.", retryable=True
)


class PoisonBook:
    """Convicts sequences with which an engine died that had nothing else, and refuses them from then on."""

    def __init__(self, known: PoisonedRequests, on_convicted: Callable[[], None]) -> None:
        self._known = known
        self._on_convicted = on_convicted

    def judge(self, sequence: LiveSequence, error: common_pb2.Error) -> common_pb2.Error:
        """Return the error of a sequence that its engine has ended with `error`.

        The loss of an engine that was about to leave counts against no request. A loss before the first token
        of a sequence in quarantine was caused by that sequence.
        """
        if error.code != common_pb2.ERROR_CODE_ENGINE_LOST:
            return error
        if sequence.link.engine.leaving:
            return ENGINE_LEFT
        if not sequence.quarantined or sequence.emitted:
            return error
        self._known.add(sequence.spec)
        self._on_convicted()
        _log.error("a request that killed engines is not run again", sequence=sequence.spec.request_id)
        return POISONED

    def check(self, spec: common_pb2.SequenceSpec) -> None:
        """Raise Refused (POISONED) if the request is remembered."""
        if spec in self._known:
            raise Refused.of(POISONED)
