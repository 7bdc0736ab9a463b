"""Records of requests, and their distributions and rates over time."""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Record:
    """One request; moments are seconds from the start of the run.

    Attributes:
        conversation: number of its conversation, `turn` its number in there; both from 0.
        due_s: when it should have started: latencies count from here. In a closed loop, when it was sent.
        sent_s: when it was sent, connecting included.
        ended_s: when its last event came, or its failure was seen.
        moments: arrivals of chunks with something generated in them. An answer without any text (of control
            tokens only) has one: its end.
        prompt_tokens, cached_tokens, output_tokens: as the server, or a tokenizer at hand, counted; None: not
            known.
        asked_tokens: the longest answer that was asked for.
        failure: its kind (connect, timeout, cut, http_429, error_event, bad_answer, length), None for none.
        detail: one line about it.
        request_id: what was sent as x-request-id, None: nothing.
    """

    conversation: int
    turn: int
    due_s: float
    sent_s: float
    ended_s: float
    moments: array[float]
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    asked_tokens: int | None
    failure: str | None
    detail: str
    request_id: str | None = None

    @property
    def ttft_ms(self) -> float | None:
        """Time to the first chunk with something in it."""
        return 1e3 * (self.moments[0] - self.due_s) if self.moments else None

    @property
    def e2e_ms(self) -> float:
        """Time to the end."""
        return 1e3 * (self.ended_s - self.due_s)

    @property
    def tpot_ms(self) -> float | None:
        """Time per token from the first chunk to the last; None without a second token or a second chunk, or
        a count."""
        if self.output_tokens is None or self.output_tokens < 2 or len(self.moments) < 2:
            return None
        return 1e3 * (self.moments[-1] - self.moments[0]) / (self.output_tokens - 1)

    @property
    def gaps_ms(self) -> list[float]:
        """Times between chunks; of a failed answer also that between the last one and its failure."""
        moments = [*self.moments, self.ended_s] if self.failure and self.moments else self.moments
        return [1e3 * (after - before) for before, after in pairwise(moments)]

    @property
    def late_ms(self) -> float:
        """How much later than due it was sent."""
        return 1e3 * (self.sent_s - self.due_s)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Summary of a set of samples, in their unit.

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
    """Return a percentile's name: p50, p99.9."""
    return f"p{percent:.10g}"


def percentile(ordered: Sequence[float], percent: float, total: int) -> float | None:
    """Return the value below which `percent` of `total` samples lie, by linear interpolation between
    neighbours (the default of numpy). `ordered` are the lowest of them; None if the rest has a say in it."""
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
    """Return the most spans (start, end) that are open at one moment; one that ends as another starts is
    over."""
    changes = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    peak = running = 0
    for _, change in changes:
        running += change
        peak = max(peak, running)
    return peak


_MAX_BINS = 600


@dataclass(frozen=True, slots=True)
class Timeline:
    """Rates in bins of `bin_s` seconds from the start to the end."""

    bin_s: float
    output_tokens_per_s: list[float]
    completed_per_s: list[float]


def timeline(records: Sequence[Record], duration_s: float) -> Timeline:
    """Return the rates of a run: the tokens of an answer are spread evenly over its chunks, since no chunk
    says how many it has. Bins are of a second at the most, of more where a run is longer than ten minutes."""
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
