"""Service level objectives: which answers count as good."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

METRICS = ("ttft", "tpot", "e2e")


def parse_objectives(words: Sequence[str]) -> dict[str, float]:
    """Read `ttft:200 tpot:50` (milliseconds). Raises ValueError, one line."""
    objectives: dict[str, float] = {}
    for word in " ".join(words).split():
        name, colon, text = word.partition(":")
        name = "e2e" if name == "e2el" else name
        if name not in METRICS or not colon:
            raise ValueError(f"{word[:50]!r} is no objective: {', '.join(METRICS)}, then : and milliseconds")
        try:
            limit = float(text)
        except ValueError:
            limit = math.nan
        if not 0 < limit < math.inf:
            raise ValueError(f"{word[:50]!r}: milliseconds above 0")
        if name in objectives:
            raise ValueError(f"{name} has two limits")
        objectives[name] = limit
    return objectives


def is_good(measured: Mapping[str, float | None], objectives: Mapping[str, float]) -> bool:
    """Whether an answer keeps every limit (milliseconds). What it has no value for it keeps: an answer of one
    token has no time per further token."""
    return all((value := measured.get(name)) is None or value <= limit for name, limit in objectives.items())
