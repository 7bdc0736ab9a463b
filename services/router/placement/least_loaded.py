"""Least loaded: the engine with the smallest share of its slots and of its KV taken."""

from __future__ import annotations

import random
from collections.abc import Sequence

from services.router.fleet import Engine
from services.router.placement.policy import PlacementPolicy, PlacementRequest, register


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

    def pick(self, request: PlacementRequest, engines: Sequence[Engine]) -> Engine | None:
        """See PlacementPolicy."""
        best: list[Engine] = []
        lowest = float("inf")
        for engine in engines:
            load = score(engine)
            if load < lowest:
                lowest = load
                best = [engine]
            elif load == lowest:
                best.append(engine)
        if not best:
            return None
        return best[0] if len(best) == 1 else self._rng.choice(best)
