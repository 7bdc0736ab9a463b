"""The router's metrics. Every label has a closed set of values, or leaves with the engine that brought it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from catenary.resume import Cause
from catenary.v1 import common_pb2, engine_pb2
from services.router.fleet import BreakerState, Engine
from services.router.handover_metrics import HandoverMetrics
from services.router.lane_metrics import LaneMetrics
from services.router.placement_metrics import PlacementMetrics

_PREFIX = "catenary_router_"


class RouterMetrics:
    """Counters of one router, in a registry of the caller's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.lanes = LaneMetrics(registry)
        self.handovers = HandoverMetrics(registry)
        self.placements = PlacementMetrics(registry)
        self.submits = Counter(_PREFIX + "submits", "Sequences submitted by clients.", registry=registry)
        self.placed_again = Counter(
            _PREFIX + "placed_again", "Sequences offered to a second engine.", registry=registry
        )
        self.engine_losses = Counter(
            _PREFIX + "engine_losses", "Engines that left, by reason.", ["reason"], registry=registry
        )
        self.engine_stalls = Counter(
            _PREFIX + "engine_stalls", "Times that an engine had work and made no step.", registry=registry
        )
        self.breaker_openings = Counter(
            _PREFIX + "breaker_openings",
            "Times that an engine was given nothing.",
            registry=registry,
        )
        self.kv_resyncs = Counter(
            _PREFIX + "kv_resyncs", "Gaps in the KV events of an engine.", registry=registry
        )
        self.kv_breaches = Counter(
            _PREFIX + "kv_breaches",
            "Streams of KV events that ended because the engine broke the contract.",
            registry=registry,
        )
        self.poisoned = Counter(
            _PREFIX + "poisoned", "Requests that killed engines when they ran alone.", registry=registry
        )
        self._resumed = Counter(
            _PREFIX + "resumed_calls",
            "Plain calls whose sequence lost its engine and went on, by cause.",
            ["cause"],
            registry=registry,
        )
        self._refusals = Counter(
            _PREFIX + "refusals", "Sequences refused, by error code.", ["code"], registry=registry
        )
        self._aborts = Counter(
            _PREFIX + "aborts", "Sequences aborted, by cause.", ["cause"], registry=registry
        )
        self._ends = Counter(
            _PREFIX + "ends",
            "Sequences ended, by reason; stalled: given up since their engine made no step.",
            ["reason"],
            registry=registry,
        )

    def refused(self, code: common_pb2.ErrorCode.ValueType) -> None:
        """Count a refusal; a code this build does not know counts as INTERNAL."""
        self._refusals.labels(_label(common_pb2.ErrorCode, code, common_pb2.ERROR_CODE_INTERNAL)).inc()

    def resumed(self, cause: Cause) -> None:
        """Count a sequence of a plain call that goes on in another life."""
        self._resumed.labels(cause).inc()

    def aborted(self, cause: str) -> None:
        """Count an abort."""
        self._aborts.labels(cause).inc()

    def ended(self, reason: common_pb2.FinishReason.ValueType, counts_as: str | None = None) -> None:
        """Count the end of an accepted sequence; `counts_as`: under another name than its reason's."""
        known = _label(common_pb2.FinishReason, reason, common_pb2.FINISH_REASON_ERROR)
        self._ends.labels(counts_as or known).inc()

    def watch(self, engines: Iterable[Engine], gauges: dict[str, tuple[str, Callable[[], int]]]) -> None:
        """Expose the fleet, and gauges given as name -> (help, value), read at scrape time."""
        self._registry.register(_LiveCollector(engines, gauges))


class _LiveCollector(Collector):
    def __init__(self, engines: Iterable[Engine], gauges: dict[str, tuple[str, Callable[[], int]]]) -> None:
        self._engines = engines
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        for name, (description, value) in self._gauges.items():
            yield GaugeMetricFamily(_PREFIX + name, description, value=value())
        states = GaugeMetricFamily(_PREFIX + "engines", "Attached engines by state.", labels=["state"])
        for name, number in engine_pb2.EngineState.items():
            states.add_metric([_short(name)], sum(engine.seen_state == number for engine in self._engines))
        yield states
        breakers = GaugeMetricFamily(
            _PREFIX + "breakers", "Attached engines by the state of their breaker.", labels=["state"]
        )
        for breaker in BreakerState:
            breakers.add_metric(
                [breaker.value], sum(engine.breaker.state is breaker for engine in self._engines)
            )
        yield breakers
        placed = GaugeMetricFamily(
            _PREFIX + "placed_sequences", "Live sequences of this router by engine.", labels=["engine"]
        )
        totals: dict[str, int] = {}
        for engine in self._engines:
            totals[engine.name] = totals.get(engine.name, 0) + engine.placed_sequences
        for name, total in totals.items():
            placed.add_metric([name], total)
        yield placed


def _label(enum: Any, value: int, unknown: int) -> str:
    """Label of an enum's value; `unknown` stands for one that a newer peer sent."""
    return _short(enum.Name(value if value in enum.values() else unknown))


def _short(name: str) -> str:
    """FINISH_REASON_STOP -> stop, ERROR_CODE_ENGINE_LOST -> engine_lost, ENGINE_STATE_SERVING -> serving."""
    return name.split("_", 2)[2].lower()
