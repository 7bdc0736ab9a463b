"""Longest cached prefix: what the exact and the approximate policy have in common."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from services.router.placement.policy import Candidates, Choice, PlacementPolicy, load, lowest, overloaded
from services.router.placement.prefixes import Matched
from services.router.placement.request import PlacementRequest


class LongestPrefix(PlacementPolicy):
    """Picks the engine with the longest prefix, the least loaded one of those that have as much.

    If that is less than `min_match` of the prompt, or all that have it are overloaded, the least loaded
    engine is taken: a short prefix is not worth a queue.
    """

    @abstractmethod
    def look(self, candidates: Candidates) -> Matched:
        """Where prefixes are looked for."""

    def pick(self, request: PlacementRequest, candidates: Candidates) -> Choice:
        """See PlacementPolicy."""
        tokens = self.look(candidates).tokens
        scores = load(candidates)
        longest = int(tokens.max())
        if longest and longest >= self._options.min_match * len(request.token_ids):
            holders = (tokens == longest) & ~overloaded(candidates, self._options)
            if holders.any():
                return Choice(lowest(np.where(holders, scores, np.inf), self._rng), "prefix", scores)
        return Choice(lowest(scores, self._rng), "least_loaded", scores)
