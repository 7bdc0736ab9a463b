"""Watches over peers that are stuck: readers that do not read, engines that have work and make no step.

A stream that is stuck in a write cannot notice itself, and an engine that is stalled may send reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from catenary.telemetry import get_logger
from services.router.dispatch.dispatcher import ENGINE_LOST, Dispatcher
from services.router.dispatch.health import EngineHealth
from services.router.dispatch.sequence import AbortCause
from services.router.fleet import Fleet
from services.router.metrics import RouterMetrics


class Watched:
    """One stream's writes. `writing` before a message goes to gRPC, `written` once it went through."""

    __slots__ = ("_clock", "_on_stall", "_since", "_strikes")

    def __init__(self, on_stall: Callable[[int], None], clock: Callable[[], float]) -> None:
        self._on_stall = on_stall
        self._clock = clock
        self._since: float | None = None
        self._strikes = 0

    def writing(self) -> None:
        """A message is on its way."""
        self._since = self._clock()

    def written(self) -> None:
        """It left."""
        self._since = None
        self._strikes = 0

    def check(self, limit_s: float) -> None:
        """Call `on_stall(n)` when a write has lasted n limits, once for each n."""
        if self._since is not None and self._clock() - self._since > limit_s * (self._strikes + 1):
            self._strikes += 1
            self._on_stall(self._strikes)


class ReaderWatch:
    """All watched streams of one kind and their limit in seconds."""

    def __init__(self, limit_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._watched: set[Watched] = set()

    def __len__(self) -> int:
        return len(self._watched)

    def add(self, on_stall: Callable[[int], None]) -> Watched:
        """Watch a stream. `on_stall` gets 1, 2, ... as its stuck write passes that many limits."""
        watched = Watched(on_stall, self._clock)
        self._watched.add(watched)
        return watched

    def remove(self, watched: Watched) -> None:
        """Stop watching. Idempotent."""
        self._watched.discard(watched)

    def sweep(self) -> None:
        """Check all streams."""
        for watched in list(self._watched):
            watched.check(self._limit_s)


_log = get_logger(__name__)


class StallWatch:
    """Gives up the sequences of an engine that made no step for `limit_s`.

    It gets nothing until it makes a step.
    """

    def __init__(
        self,
        fleet: Fleet,
        dispatcher: Dispatcher,
        health: EngineHealth,
        metrics: RouterMetrics,
        *,
        limit_s: float,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._health = health
        self._metrics = metrics
        self._limit_s = limit_s
        self._on_change = on_change
        self._clock = clock

    def sweep(self) -> None:
        """Look at all engines."""
        limit = self._clock() - self._limit_s
        for engine in list(self._fleet):
            link = self._dispatcher.link_of(engine)
            if engine.stalled or link is None or not link.sequences or engine.progress_at >= limit:
                continue
            engine.stalled = True
            ended = self._dispatcher.give_up(link, ENGINE_LOST, AbortCause.STALLED)
            self._metrics.engine_stalls.inc()
            _log.warning("engine makes no step", engine=engine.name, limit_s=self._limit_s, ended=ended)
            self._health.failed(engine)
            self._on_change()
