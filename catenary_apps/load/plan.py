"""What a run is: which server, what is asked, when, and how it is judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from catenary_apps.load.arrivals import Arrivals
from catenary_apps.load.conversations import Conversation
from catenary_apps.load.objectives import METRICS
from catenary_apps.load.statistics import percentile_name
from catenary_apps.load.target import Endpoint, Target

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
        """Raises ValueError."""
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
