"""What is counted with each token: the client library's own counters take a lock for every part of it.

Used from the event loop alone, which also answers scrapes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

_LABELS = ("model_name",)


class TokenCount:
    """Tokens of one model."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class TokenCounter(Collector):
    """A counter for each model."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._models: dict[str, TokenCount] = {}
        registry.register(self)

    def of(self, model: str) -> TokenCount:
        """What counts for a model."""
        return self._models.setdefault(model, TokenCount())

    def collect(self) -> Iterator[CounterMetricFamily]:
        """See Collector."""
        family = CounterMetricFamily(self._name, self._text, labels=_LABELS)
        for model, count in self._models.items():
            family.add_metric([model], count.value)
        yield family


class TokenTimes:
    """Seconds between the tokens of one model."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, seconds: float, times: int) -> None:
        """So many gaps of so many seconds."""
        self.counts[bisect_left(self._bounds, seconds)] += times
        self.total += seconds * times


class TokenHistogram(Collector):
    """A histogram for each model. `bounds`: the upper bounds of its buckets, rising, without infinity."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(map(float, bounds))
        self._models: dict[str, TokenTimes] = {}
        registry.register(self)

    def of(self, model: str) -> TokenTimes:
        """What counts for a model."""
        return self._models.setdefault(model, TokenTimes(self._bounds))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """See Collector."""
        family = HistogramMetricFamily(self._name, self._text, labels=_LABELS)
        for model, times in self._models.items():
            buckets: list[tuple[str, float]] = []
            counted = 0
            for bound, count in zip((*map(str, self._bounds), "+Inf"), times.counts, strict=True):
                counted += count
                buckets.append((bound, counted))
            family.add_metric([model], buckets, times.total)
        yield family
