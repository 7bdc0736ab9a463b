"""Metrics of placement, read off the receipts at scrape time."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.router.placement import ReceiptBook

_PREFIX = "catenary_router_"


class PlacementMetrics:
    """Results of placements, and how much of the prompts was cached where they went."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def watch(self, receipts: ReceiptBook) -> None:
        """Expose what was decided."""
        self._registry.register(_PlacementCollector(receipts))


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
