"""When requests are due: a gamma process whose rate is constant or climbs, as a pure function of a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

MIN_RATE = 1e-6
"""Requests a second: one in eleven days. Less would be no load, and its moments no numbers."""


class RampShape(Enum):
    """How the rate goes from one value to another."""

    LINEAR = "linear"
    EXPONENTIAL = "exponential"


@dataclass(frozen=True, slots=True)
class Ramp:
    """The rate goes from `first` to `last` (requests a second) over the whole run."""

    shape: RampShape
    first: float
    last: float

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if not (MIN_RATE <= self.first < math.inf and MIN_RATE <= self.last < math.inf):
            raise ValueError(f"the rates of a ramp are {MIN_RATE:g} or more")

    def seconds(self, count: int) -> float:
        """How long a ramp with `count` expected arrivals takes: the rate, integrated, is `count`."""
        if self.first == self.last:
            return count / self.first
        if self.shape is RampShape.LINEAR:
            return 2 * count / (self.first + self.last)
        return count * math.log1p((self.last - self.first) / self.first) / (self.last - self.first)

    def due(self, expected: float, seconds: float) -> float:
        """The moment, in seconds, by which `expected` arrivals are expected; beyond `seconds` the last rate
        goes on."""
        whole = self._expected(seconds)
        if expected > whole:
            return seconds + (expected - whole) / self.last
        if self.first == self.last:
            return expected / self.first
        if self.shape is RampShape.LINEAR:
            slope = (self.last - self.first) / seconds
            # The root of slope t^2 / 2 + first t = expected, in the form that does not cancel.
            root = math.sqrt(max(0.0, self.first**2 + 2 * slope * expected))
            return 2 * expected / (self.first + root)
        growth = math.log1p((self.last - self.first) / self.first) / seconds
        return math.log1p(expected * growth / self.first) / growth

    def _expected(self, seconds: float) -> float:
        if self.first == self.last or self.shape is RampShape.LINEAR:
            return seconds * (self.first + self.last) / 2
        return seconds * (self.last - self.first) / math.log1p((self.last - self.first) / self.first)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """An open loop: requests are due when the schedule says so, however slow the answers are.

    `rate` is in requests a second; infinity: no schedule, each request is sent as soon as it may be. Gaps are
    gamma distributed with shape `burstiness`: 1 makes a Poisson process, less comes in bursts, more is more
    even; the coefficient of variation of the gaps is 1 / sqrt(burstiness). A `ramp` takes the rate's place.
    """

    rate: float = math.inf
    burstiness: float = 1.0
    ramp: Ramp | None = None

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if not self.rate >= MIN_RATE:
            raise ValueError(f"the request rate is {MIN_RATE:g} or more")
        if not 0 < self.burstiness < math.inf:
            raise ValueError("the burstiness is above 0")
        if self.ramp is not None and self.rate < math.inf:
            raise ValueError("a ramp takes the place of a request rate")

    @property
    def scheduled(self) -> bool:
        """Whether there is a schedule."""
        return self.ramp is not None or self.rate < math.inf

    def schedule(self, count: int, seed: int, duration_s: float | None = None) -> list[float]:
        """Seconds from the start at which requests are due, in order: `count` at the most, and none at or
        after `duration_s`. A ramp takes `duration_s`, or as long as `count` requests are expected to need.

        The process is one of rate 1 whose time is stretched by the inverse of the expected arrivals, so any
        rate and any ramp have the same bursts for a seed. Raises ValueError without a schedule.
        """
        if not self.scheduled:
            raise ValueError("there is no rate")
        ramp = self.ramp
        seconds = (duration_s or ramp.seconds(count)) if ramp is not None else 0.0
        moments: list[float] = []
        for expected in _unit_process(count, self.burstiness, seed):
            due = expected / self.rate if ramp is None else ramp.due(expected, seconds)
            if duration_s is not None and due >= duration_s:
                break
            moments.append(due)
        return moments


def _unit_process(count: int, burstiness: float, seed: int) -> Iterator[float]:
    """A gamma renewal process with mean gap 1."""
    generator, now = random.Random(f"arrivals {seed}"), 0.0
    for _ in range(count):
        now += generator.gammavariate(burstiness, 1 / burstiness)
        yield now
