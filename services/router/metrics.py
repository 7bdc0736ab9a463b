"""The router's metrics. Every label has a closed set of values, or leaves with the engine that brought it.

Those of placement are read off the receipts at scrape time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from catenary.resume import Cause
from catenary.v1 import common_pb2, engine_pb2
from services.router.admission import LANE_NAMES, LaneView, RefusedFor
from services.router.fleet import BreakerState, Engine
from services.router.placement import ReceiptBook

_PREFIX = "catenary_router_"

# All that `count` is called with, and what `handed_over` counts.
RESULTS = ("begun", "offered", "done", "recomputed", "refused", "failed", "lost")


class HandoverMetrics:
    """Counts the parts of split sequences as they begin and end."""

    def __init__(self, registry: CollectorRegistry) -> None:
        handovers = Counter(
            _PREFIX + "handovers",
            "Prompts given to engines that compute prompts alone (begun), those that were offered on, and "
            "what came of them: the KV arrived (done), or another engine computed the prompt after all, as "
            "the KV did not arrive or could not be fetched (recomputed), or the first engine refused it or "
            "failed, or an engine was lost with either half.",
            ["result"],
            registry=registry,
        )
        self._results = {name: handovers.labels(name) for name in RESULTS}
        self._tokens = Counter(
            _PREFIX + "transferred_tokens",
            "Prompt tokens whose KV went to another engine.",
            registry=registry,
        )

    def count(self, result: str) -> None:
        """Count one of RESULTS but `done`."""
        self._results[result].inc()

    def handed_over(self, tokens: int) -> None:
        """Count a sequence that ended, of whose prompt so many tokens came from another engine."""
        self._results["done"].inc()
        self._tokens.inc(tokens)


_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_CLASS = ["class"]

Views = Callable[[], Sequence[LaneView]]


class LaneMetrics:
    """Waits, counted as they end; the other metrics of lanes are read at scrape time."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        waits = Histogram(
            _PREFIX + "queue_wait_seconds",
            "Seconds that sequences waited for an engine, those that had to wait.",
            _CLASS,
            buckets=_SECONDS,
            registry=registry,
        )
        self._waits = [waits.labels(name) for name in LANE_NAMES]

    def waited(self, lane: int, seconds: float) -> None:
        """Count a wait of this class that ended with a placement."""
        self._waits[lane].observe(seconds)

    def watch(self, views: Views) -> None:
        """Expose the lanes."""
        self.registry.register(_LaneCollector(views))


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


class PlacementMetrics:
    """Results of placements, and how much of the prompts was cached where they went."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

    def watch(self, receipts: ReceiptBook) -> None:
        """Expose the decisions."""
        self.registry.register(_PlacementCollector(receipts))


class _PlacementCollector(Collector):
    def __init__(self, receipts: ReceiptBook) -> None:
        self._receipts = receipts

    def collect(self) -> Iterator[Metric]:
        placed = CounterMetricFamily(
            _PREFIX + "placements",
            "Sequences given to an engine, by policy and by the reason in the receipt.",
            labels=["policy", "reason"],
        )
        for (policy, reason), count in self._receipts.decisions.items():
            placed.add_metric([policy, reason], count)
        yield placed
        for name, text, tokens in (
            ("placed_prompt_tokens", "Prompt tokens of those sequences.", self._receipts.prompt_tokens),
            (
                "matched_prompt_tokens",
                "Those of them that were cached on the engine, as far as placement knew.",
                self._receipts.matched_tokens,
            ),
        ):
            yield CounterMetricFamily(_PREFIX + name, text, value=tokens)


class RouterMetrics:
    """Counters of one router, in a registry of the caller's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
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
        """Count a sequence of a plain call that is resumed."""
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
        self.registry.register(_LiveCollector(engines, gauges))


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
    """Return the label of an enum's value; `unknown` stands for one that a newer peer sent."""
    return _short(enum.Name(value if value in enum.values() else unknown))


def _short(name: str) -> str:
    """Return the label of a name: FINISH_REASON_STOP -> stop, ERROR_CODE_ENGINE_LOST -> engine_lost."""
    return name.split("_", 2)[2].lower()
