"""Metrics of the lanes of admission."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.router.admission import LANE_NAMES, LaneView, RefusedFor

_PREFIX = "catenary_router_"
_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_CLASS = ["class"]

Views = Callable[[], Sequence[LaneView]]


class LaneMetrics:
    """Waits, as they end; what else there is to know of lanes is read at scrape time."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        waits = Histogram(
            _PREFIX + "queue_wait_seconds",
            "Seconds that sequences waited for an engine, those that had to wait.",
            _CLASS,
            buckets=_SECONDS,
            registry=registry,
        )
        self._waits = [waits.labels(name) for name in LANE_NAMES]

    def waited(self, lane: int, seconds: float) -> None:
        """A wait of this class ended with an engine."""
        self._waits[lane].observe(seconds)

    def watch(self, views: Views) -> None:
        """Expose the lanes."""
        self._registry.register(_LaneCollector(views))


class _LaneCollector(Collector):
    def __init__(self, views: Views) -> None:
        self._views = views

    def collect(self) -> Iterator[Metric]:
        lanes = dict(zip(LANE_NAMES, self._views(), strict=True))
        yield _gauge(
            "queued", "Sequences that wait for an engine.", lanes, lambda lane: lane.queued_sequences
        )
        yield _gauge("queued_tokens", "Tokens of those.", lanes, lambda lane: lane.queued_tokens)
        yield _gauge("queued_tenants", "Tenants of those.", lanes, lambda lane: lane.tenants)
        yield _gauge(
            "oldest_wait_seconds", "Longest wait of what comes next.", lanes, lambda lane: lane.oldest_wait_s
        )
        yield _gauge("lane_live", "Sequences that engines have.", lanes, lambda lane: lane.live_sequences)
        admitted = CounterMetricFamily(
            _PREFIX + "admitted", "Sequences that were given to an engine.", labels=_CLASS
        )
        promoted = CounterMetricFamily(
            _PREFIX + "promoted", "Sequences that moved up a class as they waited.", labels=_CLASS
        )
        turned_away = CounterMetricFamily(
            _PREFIX + "turned_away",
            "Sequences that were refused for want of room, by reason.",
            labels=[*_CLASS, "reason"],
        )
        for name, lane in lanes.items():
            admitted.add_metric([name], lane.counts.admitted)
            promoted.add_metric([name], lane.counts.promoted)
            for reason in RefusedFor:
                turned_away.add_metric([name, reason], lane.counts.refused[reason])
        yield from (admitted, promoted, turned_away)


def _gauge(
    name: str, text: str, lanes: dict[str, LaneView], value: Callable[[LaneView], float]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(_PREFIX + name, text, labels=_CLASS)
    for label, lane in lanes.items():
        family.add_metric([label], value(lane))
    return family
