"""Least loaded: the engine with the smallest share of its slots and of its KV taken."""

from __future__ import annotations

from services.router.placement.policy import (
    Candidates,
    Choice,
    PlacementPolicy,
    PlacementRequest,
    load,
    lowest,
    register,
)


@register("least_loaded")
class LeastLoaded(PlacementPolicy):
    """Picks the lowest load, at random among equals."""

    def pick(self, request: PlacementRequest, candidates: Candidates) -> Choice:
        """See PlacementPolicy."""
        scores = load(candidates)
        return Choice(lowest(scores, self._rng), "least_loaded", scores)
