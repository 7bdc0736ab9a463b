"""Whether engines are well by what they do: faults and good ends for their breakers, steps for stalls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from catenary.telemetry import get_logger
from services.router.fleet import Engine
from services.router.metrics import RouterMetrics

_log = get_logger(__name__)


class EngineHealth:
    """Tells the breakers. `on_change` is called when other engines than before may be given sequences."""

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
        """Its link broke, its core died, or it failed a sequence, as Blame decides, by its own fault. What it
        ends as it drains is none. Returns the time of the fault, for `acquitted`."""
        now = self._clock()
        if engine.leaving or not engine.breaker.failed(now):
            return now
        engine.touch()
        self._metrics.breaker_openings.inc()
        _log.warning("engine is given nothing for a time: too many faults", engine=engine.name)
        self._on_change()
        return now

    def acquitted(self, engine: Engine, at: float) -> None:
        """The fault of time `at` that it was given was no fault of its own."""
        if engine.breaker.acquitted(at):
            self._closed(engine)

    def succeeded(self, engine: Engine) -> None:
        """It ended a sequence well."""
        if engine.breaker.succeeded():
            self._closed(engine)

    def stepped(self, engine: Engine) -> None:
        """It made a step."""
        now = self._clock()
        was_stalled = engine.stalled
        engine.stepped(now)
        if engine.breaker.stepped(now):
            self._closed(engine)
        elif was_stalled:
            self._on_change()

    def got_work(self, engine: Engine) -> None:
        """It had nothing and is given a sequence: its time to make a step begins."""
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
