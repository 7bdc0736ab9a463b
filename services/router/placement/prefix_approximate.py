"""Prefix-aware by what this router sent where."""

from __future__ import annotations

from typing import ClassVar

from services.router.placement.policy import Candidates, Memory, register
from services.router.placement.prefix import LongestPrefix
from services.router.placement.prefixes import Matched


@register("prefix_approximate")
class PrefixApproximate(LongestPrefix):
    """Needs no events. Knows neither what other routers sent nor what an engine has given up."""

    memory: ClassVar[Memory] = Memory.ALL

    def look(self, candidates: Candidates) -> Matched:
        """See LongestPrefix."""
        return candidates.guessed()
