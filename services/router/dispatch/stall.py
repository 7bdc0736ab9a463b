"""Engines that have work and make no step, seen from the router: they may send reports all the same."""

from __future__ import annotations

import time
from collections.abc import Callable

from catenary.telemetry import get_logger
from services.router.dispatch.dispatcher import ENGINE_LOST, Dispatcher
from services.router.dispatch.health import EngineHealth
from services.router.dispatch.sequence import AbortCause
from services.router.fleet import Fleet
from services.router.metrics import RouterMetrics

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
