"""Longest cached prefix, known from KV events (exact) or guessed from what was sent (approximate)."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np

from services.router.placement.policy import (
    Candidates,
    Choice,
    Matched,
    Memory,
    PlacementPolicy,
    PlacementRequest,
    load,
    lowest,
    overloaded,
    register,
)


class LongestPrefix(PlacementPolicy):
    """Picks the engine with the longest prefix, the least loaded one of those that have as much.

    If that is less than `min_match` of the prompt, or all that have it are overloaded, the least loaded
    engine is taken: a short prefix is not worth a queue.
    """

    @abstractmethod
    def look(self, candidates: Candidates) -> Matched:
        """Return the cached tokens of the candidates."""

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


@register("prefix_exact")
class PrefixExact(LongestPrefix):
    """Longest prefix by KV events: engines that publish none have no prefixes."""

    def look(self, candidates: Candidates) -> Matched:
        """See LongestPrefix."""
        return candidates.told()


@register("prefix_approximate")
class PrefixApproximate(LongestPrefix):
    """Longest prefix by what this router sent; knows neither other routers' sequences nor evictions."""

    memory: ClassVar[Memory] = Memory.ALL

    def look(self, candidates: Candidates) -> Matched:
        """See LongestPrefix."""
        return candidates.guessed()
