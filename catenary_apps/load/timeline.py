"""Throughput over the time of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from catenary_apps.load.records import Record

_MAX_BINS = 600


@dataclass(frozen=True, slots=True)
class Timeline:
    """Rates in bins of `bin_s` seconds from the start to the end."""

    bin_s: float
    output_tokens_per_s: list[float]
    completed_per_s: list[float]


def timeline(records: Sequence[Record], duration_s: float) -> Timeline:
    """The rates of a run: the tokens of an answer are spread evenly over its chunks, since no chunk says how
    many it has. Bins are of a second at the most, of more where a run takes longer than ten minutes.
    """
    bins = min(max(1, math.ceil(duration_s)), _MAX_BINS)
    bin_s = max(duration_s, 1e-9) / bins
    tokens, completed = [0.0] * bins, [0.0] * bins

    def place(moment: float) -> int:
        return min(max(int(moment / bin_s), 0), bins - 1)

    for record in records:
        if record.failure is not None:
            continue
        completed[place(record.ended_s)] += 1 / bin_s
        share = (record.output_tokens or 0) / max(1, len(record.moments))
        for moment in record.moments:
            tokens[place(moment)] += share / bin_s
    return Timeline(bin_s, tokens, completed)
