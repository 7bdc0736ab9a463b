"""Tokens per second of engines, from the differences of their reports."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

# Reports further apart than that are averaged no more.
_WINDOW_S = 5.0
# When a report was made is known to a few milliseconds: closer ones say nothing about a rate.
_LEAST_S = 0.1


@dataclass(frozen=True, slots=True)
class Progress:
    """Tokens that an engine had generated since its start. `at`: the report's time, in seconds of a clock."""

    at: float
    generated_tokens: int


class Rates:
    """Remembers the last seconds of each engine."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[Progress]] = {}

    def update(self, reports: Mapping[str, Progress]) -> dict[str, float | None]:
        """Take the newest report of each engine, by instance id, and return its tokens per second.

        None: there is one report so far, or its counter has begun anew. Engines that are not there are
        forgotten.
        """
        self._seen = {name: self._seen.get(name, deque()) for name in reports}
        return {name: _rate(self._seen[name], report) for name, report in reports.items()}


def _rate(seen: deque[Progress], newest: Progress) -> float | None:
    if seen and newest.generated_tokens < seen[-1].generated_tokens:
        # The core was started again.
        seen.clear()
    if not seen or newest.at - seen[-1].at >= _LEAST_S:
        seen.append(newest)
    # Two stay, however slow the reports are.
    while len(seen) > 2 and seen[-1].at - seen[0].at > _WINDOW_S:
        seen.popleft()
    if len(seen) < 2:
        return None
    return (seen[-1].generated_tokens - seen[0].generated_tokens) / (seen[-1].at - seen[0].at)
