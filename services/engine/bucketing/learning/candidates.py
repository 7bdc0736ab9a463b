"""Values at which a boundary may lie: those that were seen, thinned evenly by weight and by size."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping


def thinned(weights: Mapping[int, float], most: int, *, keep: Collection[int] = ()) -> list[int]:
    """At most `most` of the values, rising, plus those of `keep`; all of them if they are no more.

    A gap between two neighbours is about the same share of the weight and of the logarithmic axis as any
    other: many boundaries where the steps are, and some everywhere.
    """
    values = sorted({*weights, *keep})
    if len(values) <= most:
        return values
    total = sum(weights.values()) or 1.0
    low, high = math.log(values[0] + 1), math.log(values[-1] + 1)
    chosen = {values[-1], *keep}
    before, next_level = 0.0, 0.0
    for value in values:
        before += weights.get(value, 0.0)
        position = 0.7 * before / total + 0.3 * (math.log(value + 1) - low) / (high - low)
        if position * (most - 1) >= next_level:
            chosen.add(value)
            next_level = math.floor(position * (most - 1)) + 1
    return sorted(chosen)
