"""Least loaded: the engine with the smallest share of its slots and of its KV taken."""

from __future__ import annotations

import random
from collections.abc import Sequence

from services.router.fleet import Engine
from services.router.placement.policy import Choice, PlacementPolicy, register
from services.router.placement.request import PlacementRequest


def score(engine: Engine) -> float:
    """Load of an engine: share of its running slots taken plus share of its KV taken. 0 is idle.

    Both shares count what others placed by the last report and what this router has placed by now. They are
    shares, not counts, so that unequal engines fill up alike.
    """
    capacity = engine.capacity
    slots = capacity.max_running or 1
    kv_tokens = capacity.total_blocks * capacity.block_size or 1
    return engine.sequences / slots + engine.tokens / kv_tokens


@register("least_loaded")
class LeastLoaded(PlacementPolicy):
    """Picks the lowest score, at random among equals, so that several routers do not herd."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def pick(self, request: PlacementRequest, engines: Sequence[Engine]) -> Choice | None:
        """See PlacementPolicy."""
        if not engines:
            return None
        scores = [(engine, score(engine)) for engine in engines]
        lowest = min(load for _, load in scores)
        best = [engine for engine, load in scores if load == lowest]
        return Choice(best[0] if len(best) == 1 else self._rng.choice(best), "least_loaded", scores)
