"""`habana_frameworks.torch.hpu.metrics` (gaudi-facts.md 4.4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from services.engine.device.sim.card import card


@dataclass(frozen=True, slots=True)
class _Reading:
    compilations: int
    seconds: float
    fallbacks: int
    fallback_ops: Counter[str]
    hits: int
    misses: int

    @classmethod
    def now(cls) -> _Reading:
        counters = card().counters
        return cls(
            counters.compilations,
            counters.compile_seconds,
            counters.fallbacks,
            Counter(counters.fallback_ops),
            counters.recipe_hits,
            counters.recipe_misses,
        )


class Metric:
    """A metric since a moment, up to now or to its end."""

    def __init__(self, name: str, since: _Reading) -> None:
        if name not in ("graph_compilation", "cpu_fallback", "memory_defragmentation", "recipe_cache"):
            raise KeyError(f"no metric {name!r}")
        self._name = name
        self._since = since
        self._end: _Reading | None = None

    def end(self) -> None:
        """Stop counting."""
        self._end = _Reading.now()

    def stats(self) -> list[tuple[str, Any]]:
        """Return the names with their values."""
        now, since = self._end or _Reading.now(), self._since
        if self._name == "graph_compilation":
            number = now.compilations - since.compilations
            seconds = now.seconds - since.seconds
            average = seconds / number if number else 0.0
            return [("TotalNumber", number), ("TotalTime", seconds), ("AvgTime", average)]
        if self._name == "cpu_fallback":
            operations = now.fallback_ops - since.fallback_ops
            return [("TotalNumber", now.fallbacks - since.fallbacks), ("FallbackOps", dict(operations))]
        if self._name == "recipe_cache":
            hits, misses = now.hits - since.hits, now.misses - since.misses
            return [("TotalHit", hits), ("RecipeHit", hits), ("TotalMiss", misses), ("RecipeMiss", misses)]
        return [("TotalNumber", 0), ("TotalSuccessful", 0), ("AvgTime", 0.0), ("MaxTime", 0.0)]


_ZERO = _Reading(0, 0.0, 0, Counter(), 0, 0)


def metric_global(name: str) -> Metric:
    """Since the start of the process."""
    return Metric(name, _ZERO)


@contextmanager
def metric_localcontext(name: str) -> Iterator[Metric]:
    """Of what happens inside."""
    metric = Metric(name, _Reading.now())
    yield metric
    metric.end()
