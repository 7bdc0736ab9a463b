"""Samples as a mean, a spread and percentiles, in which a failure is slower than every answer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Distribution:
    """What is said of a set of samples, in their unit.

    `count` samples were measured and `failed` more have no value. Mean, standard deviation (of the
    population), minimum and maximum are of the measured ones, None if there are none. Median and percentiles
    are of all, a failed one being slower than every other: None where a percentile falls among the failed.
    """

    count: int
    failed: int
    mean: float | None
    median: float | None
    std: float | None
    minimum: float | None
    maximum: float | None
    percentiles: dict[float, float | None]


def describe(samples: Sequence[float], percentiles: Sequence[float], *, failed: int = 0) -> Distribution:
    """Describe samples in any order; `percentiles` are 0 .. 100."""
    ordered = sorted(samples)
    total = len(ordered) + failed
    ranks = {float(one): percentile(ordered, one, total) for one in percentiles}
    median = percentile(ordered, 50, total)
    if not ordered:
        return Distribution(0, failed, None, median, None, None, None, ranks)
    mean = statistics.fmean(ordered)
    std = math.sqrt(statistics.fmean([(value - mean) ** 2 for value in ordered]))
    return Distribution(len(ordered), failed, mean, median, std, ordered[0], ordered[-1], ranks)


def percentile_name(percent: float) -> str:
    """p50, p99.9."""
    return f"p{percent:.10g}"


def percentile(ordered: Sequence[float], percent: float, total: int) -> float | None:
    """The value below which `percent` of `total` samples lie, by linear interpolation between neighbours (the
    default of numpy). `ordered` are the lowest of them; None if the rest has a say in it.
    """
    if total == 0:
        return None
    position = (total - 1) * percent / 100
    below = math.floor(position)
    above = min(below + (position > below), total - 1)
    if above >= len(ordered):
        return None
    low, high = ordered[below], ordered[above]
    # As numpy does: from the nearer end, so that the result lies between the two and never shrinks.
    part = position - below
    return low + (high - low) * part if part < 0.5 else high - (high - low) * (1 - part)


def peak_overlap(spans: Sequence[tuple[float, float]]) -> int:
    """The most spans (start, end) that are open at one moment; one that ends as another starts is over."""
    changes = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    peak = running = 0
    for _, change in changes:
        running += change
        peak = max(peak, running)
    return peak
