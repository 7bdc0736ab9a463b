"""Metrics of sequences that two engines compute."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

_PREFIX = "catenary_router_"

# All that `count` is called with, and what `handed_over` counts.
RESULTS = ("begun", "offered", "done", "recomputed", "refused", "failed", "lost")


class HandoverMetrics:
    """Counts the halves as they begin and end."""

    def __init__(self, registry: CollectorRegistry) -> None:
        halves = Counter(
            _PREFIX + "handovers",
            "Prompts given to engines that compute prompts alone (begun), those that were offered on, and "
            "what came of them: the KV arrived (done), or another engine computed the prompt after all, as "
            "the KV did not arrive or could not be fetched (recomputed), or the first engine refused it or "
            "failed, or an engine was lost with either half.",
            ["result"],
            registry=registry,
        )
        self._results = {name: halves.labels(name) for name in RESULTS}
        self._tokens = Counter(
            _PREFIX + "transferred_tokens",
            "Prompt tokens whose KV went to another engine.",
            registry=registry,
        )

    def count(self, result: str) -> None:
        """One of RESULTS but `done`."""
        self._results[result].inc()

    def handed_over(self, tokens: int) -> None:
        """A sequence ended, so many tokens of whose prompt came from another engine."""
        self._results["done"].inc()
        self._tokens.inc(tokens)
