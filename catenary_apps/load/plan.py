"""The plan of a run: server, conversations, arrivals, objectives."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from catenary_apps.load.conversations import Conversation
from catenary_apps.load.statistics import percentile_name
from catenary_apps.load.target import Endpoint, Target

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
        """Raise ValueError."""
        if not (MIN_RATE <= self.first < math.inf and MIN_RATE <= self.last < math.inf):
            raise ValueError(f"the rates of a ramp are {MIN_RATE:g} or more")

    def seconds(self, count: int) -> float:
        """Return how long a ramp with `count` expected arrivals takes: the rate, integrated, is `count`."""
        if self.first == self.last:
            return count / self.first
        if self.shape is RampShape.LINEAR:
            return 2 * count / (self.first + self.last)
        return count * math.log1p((self.last - self.first) / self.first) / (self.last - self.first)

    def due(self, expected: float, seconds: float) -> float:
        """Return the moment, in seconds, by which `expected` arrivals are expected; beyond `seconds` the last
        rate goes on."""
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
        """Raise ValueError."""
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
        """Return seconds from the start at which requests are due, in order: `count` at the most, and none at
        or after `duration_s`. A ramp takes `duration_s`, or as long as `count` requests are expected to need.

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
    """Yield a gamma renewal process with mean gap 1."""
    generator, now = random.Random(f"arrivals {seed}"), 0.0
    for _ in range(count):
        now += generator.gammavariate(burstiness, 1 / burstiness)
        yield now


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
    """Return whether an answer keeps every limit (milliseconds).

    What it has no value for it keeps: an answer of one token has no time per further token.
    """
    return all((value := measured.get(name)) is None or value <= limit for name, limit in objectives.items())


DEFAULT_PERCENTILES = (50.0, 90.0, 95.0, 99.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """A run against a server.

    With a schedule in `arrivals` it is an open loop: conversations begin when they are due, however slow the
    answers are, and latencies count from then on. Without one they begin as soon as there is a place among
    `max_concurrency` (None: all at once), and latencies count from the sending.

    Attributes:
        target: the server.
        conversations: what is asked, each once; the first `warmup` of them before the clock runs.
        arrivals: when conversations are due.
        max_concurrency: most conversations at a time. With a schedule, waiting for a place counts as latency.
        duration_s: none begins so many seconds after the first may; those that run end in their own time.
        ready_timeout_s: how long the server may take to list the model before anything is asked; 0: it is
            not waited for.
        warmup: conversations that are not counted.
        think_time_s: pause between an answer and the next turn.
        strict_lengths: send `ignore_eos` and `min_tokens`; an answer of another length is a failure.
        objectives: limits in milliseconds for what counts as goodput, by name (ttft, tpot, e2e).
        percentiles: which are reported, 0..100.
        seed: of the schedule.
    """

    target: Target
    conversations: Sequence[Conversation]
    arrivals: Arrivals = field(default_factory=Arrivals)
    max_concurrency: int | None = None
    duration_s: float | None = None
    ready_timeout_s: float = 0.0
    warmup: int = 0
    think_time_s: float = 0.0
    strict_lengths: bool = False
    objectives: Mapping[str, float] = field(default_factory=dict)
    percentiles: Sequence[float] = DEFAULT_PERCENTILES
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError."""
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ValueError("at least one conversation runs at a time")
        if self.duration_s is not None and not self.duration_s > 0:
            raise ValueError("the duration is above 0")
        if self.warmup < 0 or self.think_time_s < 0 or self.ready_timeout_s < 0:
            raise ValueError("none of warm-up, think time and time to be ready is below 0")
        if self.warmup >= len(self.conversations):
            raise ValueError(
                f"of {len(self.conversations)} conversations, {self.warmup} of warm-up leave none"
            )
        if not set(self.objectives) <= set(METRICS):
            raise ValueError(f"objectives are {', '.join(METRICS)}")
        unlike = {percentile_name(one) for one in self.percentiles}
        if not all(0 <= one <= 100 for one in self.percentiles) or len(unlike) < len(self.percentiles):
            raise ValueError("percentiles are 0 to 100, each of them once")
        for conversation in self.conversations:
            texts = [isinstance(turn.prompt, str) for turn in conversation.turns]
            if not texts:
                raise ValueError("a conversation has at least one turn")
            if not all(texts) and (len(texts) > 1 or self.target.endpoint is Endpoint.CHAT):
                raise ValueError("token ids are for completions of one turn; all else takes text")
