"""Round robin: one engine after the other."""

from __future__ import annotations

import random

import numpy as np

from services.router.placement.policy import (
    Candidates,
    Choice,
    PlacementOptions,
    PlacementPolicy,
    PlacementRequest,
    register,
)

# Models whose turns are remembered; with more than that, turns begin again.
_MAX_MODELS = 1024


@register("round_robin")
class RoundRobin(PlacementPolicy):
    """Picks the next engine in the order of attachment. Load and cache count for nothing.

    Those that cannot take a request are passed over, so an engine that is gone gets no share.
    """

    def __init__(self, rng: random.Random, options: PlacementOptions | None = None) -> None:
        super().__init__(rng, options)
        # Epoch of the engine that had the last turn: epochs rise in the order of attachment.
        self._last: dict[str, int] = {}

    def pick(self, request: PlacementRequest, candidates: Candidates) -> Choice:
        """See PlacementPolicy."""
        if request.model not in self._last and len(self._last) >= _MAX_MODELS:
            self._last.clear()
        last = self._last.get(request.model, -1)
        epochs = candidates.of(candidates.columns.epochs)
        position = int(np.searchsorted(epochs, last, side="right")) % len(candidates)
        self._last[request.model] = int(epochs[position])
        return Choice(position, "round_robin")
