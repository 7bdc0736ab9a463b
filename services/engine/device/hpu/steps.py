"""Compilations and CPU fallbacks of a step, by the bridge's metrics. Source: gaudi-facts.md 2.4 and 4.4."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from catenary.telemetry import get_logger
from services.engine.device.hpu.bridge import Metric, MetricsModule
from services.engine.device.hpu.settings import StepLog

log = get_logger(__name__)

COMPILATIONS = "graph_compilation"
FALLBACKS = "cpu_fallback"


class StepMetrics:
    """Logs what each step compiled and what of it ran on the CPU, as far as the settings ask for it."""

    def __init__(self, metrics: MetricsModule, compilations: StepLog, fallbacks: StepLog) -> None:
        self._metrics = metrics
        self._wanted = {COMPILATIONS: compilations, FALLBACKS: fallbacks}

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around the device's part of a step."""
        wanted = [name for name, which in self._wanted.items() if which is not StepLog.OFF]
        with ExitStack() as stack:
            metrics = {name: stack.enter_context(self._metrics.metric_localcontext(name)) for name in wanted}
            yield
        for name, metric in metrics.items():
            self._report(name, metric, number)

    def _report(self, name: str, metric: Metric, number: int) -> None:
        values = dict(metric.stats())
        count = values["TotalNumber"]
        if not count and self._wanted[name] is not StepLog.ALL:
            return
        if name == COMPILATIONS:
            log.info("graph compilations of a step", step=number, count=count, time=values["TotalTime"])
        else:
            log.info("CPU fallbacks of a step", step=number, count=count, ops=values["FallbackOps"])
