"""Power of two choices: the less loaded of two engines drawn at random."""

from __future__ import annotations

from services.router.placement.policy import (
    Candidates,
    Choice,
    PlacementPolicy,
    PlacementRequest,
    load,
    register,
)


@register("power_of_two")
class PowerOfTwo(PlacementPolicy):
    """Nearly as even as least loaded, and calmer where several routers see the same stale loads."""

    def pick(self, request: PlacementRequest, candidates: Candidates) -> Choice:
        """See PlacementPolicy."""
        if len(candidates) == 1:
            return Choice(0, "only_one")
        first, second = self._rng.sample(range(len(candidates)), 2)
        scores = load(candidates)
        return Choice(first if scores[first] <= scores[second] else second, "power_of_two", scores)
