"""Prefix-aware by what engines tell of their caches."""

from __future__ import annotations

from services.router.placement.policy import Candidates, register
from services.router.placement.prefix import LongestPrefix
from services.router.placement.prefixes import Matched


@register("prefix_exact")
class PrefixExact(LongestPrefix):
    """Believes KV events alone: engines that publish none have no prefixes."""

    def look(self, candidates: Candidates) -> Matched:
        """See LongestPrefix."""
        return candidates.told()
