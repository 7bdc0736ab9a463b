"""One attached engine as this router knows it, and an estimate of its KV between its reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from catenary.v1 import common_pb2, engine_pb2
from services.router.fleet.breaker import Breaker, BreakerOptions, BreakerState


class KvLoad:
    """Tokens of KV that an engine holds or is about to hold.

    What was placed since its last report is added to the report; so is what was placed in the interval
    before, which the report may not have seen yet. What ended since is taken off. An estimate: an engine that
    has less room than it seems lets sequences wait, and one with more shows it in its next report.
    """

    __slots__ = ("_aging", "_fresh", "_released", "_reported", "_reports")

    def __init__(self) -> None:
        self._reported = 0
        self._fresh = 0
        self._aging = 0
        self._released = 0
        self._reports = 0

    @property
    def held(self) -> int:
        """The estimated tokens of KV."""
        return max(0, self._reported - self._released) + self._fresh + self._aging

    def report(self, tokens: int) -> None:
        """Take over the tokens that the engine reports as held or promised."""
        self._reported = tokens
        self._aging, self._fresh = self._fresh, 0
        self._released = 0
        self._reports += 1

    def place(self, tokens: int) -> int:
        """Count the tokens of a placement. Returns the mark to release them with."""
        self._fresh += tokens
        return self._reports

    def release(self, mark: int, tokens: int) -> None:
        """Release the tokens of a placement."""
        if mark == self._reports:
            self._fresh -= tokens
        elif mark == self._reports - 1:
            self._aging -= tokens
        else:
            self._released += tokens


# Placement weighs these: a change of one marks the row of the engine as stale.
_WEIGHED = frozenset(
    {
        "state",
        "stalled",
        "draining",
        "full",
        "reserved_for",
        "reported_at",
        "placed_sequences",
        "placed_tokens",
        "placed_prefill",
        "foreign_sequences",
        "foreign_tokens",
        "foreign_prefill",
    }
)


@dataclass(slots=True, eq=False)
class Engine:
    """An attachment: facts of the hello, the last report, and what this router has placed on it.

    A new attachment of the same engine process is a new `Engine` with a higher epoch; the old one is never
    revived.
    """

    # Where it enters itself when its row in the columns is out of date. First, as __setattr__ needs it.
    stale: set[Engine] | None = field(default=None, kw_only=True, repr=False)
    instance_id: str
    name: str
    version: str
    device: str
    model: common_pb2.ModelInfo
    capacity: engine_pb2.Capacity
    epoch: int
    state: engine_pb2.EngineState.ValueType
    last_heard: float
    # Never UNSPECIFIED.
    role: engine_pb2.EngineRole.ValueType = engine_pb2.ENGINE_ROLE_BOTH
    publishes_kv: bool = False
    breaker: Breaker = field(default_factory=lambda: Breaker(BreakerOptions()))
    # It was told to drain; its reports may not say so yet.
    draining: bool = False
    # It had work and made no step for too long.
    stalled: bool = False
    # When it last made a step, or got work after it had none.
    progress_at: float = 0.0
    # When its last report came.
    reported_at: float = 0.0
    # Sequences that it is given beyond those it runs at once: no place stays empty for a round trip.
    backlog: int = 0
    kv: KvLoad = field(default_factory=KvLoad)
    # It refused a sequence as it is full, or is reserved by another router: given nothing before it reports
    # again.
    full: bool = False
    # The request that it is reserved for.
    reserved_for: object = None
    # None until the first one of this epoch.
    report: engine_pb2.LoadReport | None = None
    # Kept by LoadGuard alone.
    placed_sequences: int = 0
    placed_tokens: int = 0
    # Prompt tokens to compute, of sequences that have had no token yet.
    placed_prefill: int = 0
    # The last report beyond this router's placements: other routers' work, and ours beyond its prompts.
    foreign_sequences: int = 0
    foreign_tokens: int = 0
    foreign_prefill: int = 0
    # Its row in the columns.
    row: int = -1

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in _WEIGHED:
            self.touch()

    def touch(self) -> None:
        """Have the fleet refresh the row, for a change other than of an attribute."""
        if self.stale is not None:
            self.stale.add(self)

    @property
    def seen_state(self) -> engine_pb2.EngineState.ValueType:
        """The worse of its state by its reports and by the router's own knowledge."""
        if self.state == engine_pb2.ENGINE_STATE_SERVING:
            if self.stalled:
                return engine_pb2.ENGINE_STATE_STALLED
            if self.draining:
                return engine_pb2.ENGINE_STATE_DRAINING
        return self.state

    @property
    def serving(self) -> bool:
        """Whether it takes sequences, its breaker aside."""
        return self.state == engine_pb2.ENGINE_STATE_SERVING and not self.stalled and not self.draining

    @property
    def leaving(self) -> bool:
        """Whether it finishes what it has and ends."""
        return self.draining or self.state == engine_pb2.ENGINE_STATE_DRAINING

    @property
    def available(self) -> bool:
        """Whether it may be given a sequence now, if it has room: it serves and its breaker allows it."""
        if not self.serving:
            return False
        state = self.breaker.state
        return state is BreakerState.CLOSED or (
            state is BreakerState.HALF_OPEN and self.placed_sequences == 0
        )

    def does(self, role: engine_pb2.EngineRole.ValueType | None) -> bool:
        """Whether it takes what `role` is for: PREFILL prompts alone, DECODE the KV of such.

        None: whole sequences, which one for prefill does not, and with UNSPECIFIED even that.
        """
        if role is not None:
            return role in (engine_pb2.ENGINE_ROLE_UNSPECIFIED, self.role)
        return self.role != engine_pb2.ENGINE_ROLE_PREFILL

    @property
    def sequences(self) -> int:
        """Sequences it holds by the best knowledge: others' by the last report, ours as of now.

        Ours are counted from the placement, not from the next report: a burst between two reports spreads.
        """
        return self.foreign_sequences + self.placed_sequences

    @property
    def tokens(self) -> int:
        """Tokens of KV it holds or is about to hold, by the same rule."""
        return self.foreign_tokens + self.placed_tokens

    @property
    def kv_tokens(self) -> int:
        """Tokens that its KV has room for, when nothing else is in it."""
        return self.capacity.total_blocks * self.capacity.block_size

    @property
    def prefill(self) -> int:
        """Prompt tokens that it has yet to compute, by the same rule."""
        return self.foreign_prefill + self.placed_prefill

    @property
    def room(self) -> int:
        """The sequences that it may still be given, its KV aside."""
        return 0 if self.full else self.capacity.max_running + self.backlog - self.sequences

    def heard(self, now: float) -> None:
        """Renew the lease: a valid message came at monotonic time `now`."""
        self.last_heard = now

    def stepped(self, now: float) -> None:
        """Count a step: it is not stalled."""
        self.progress_at = now
        if self.stalled:
            self.stalled = False

    def apply(self, report: engine_pb2.LoadReport) -> bool:
        """Take over a report, just `heard`. False, and nothing changed, if it is not newer than the last one.

        Steps that it counts are progress, also those for other routers' sequences; and one that has nothing
        owes none, unless it was given something here that has not ended.

        Numbers beyond the capacity of the hello count as that capacity: sums over engines stay sensible, and
        an engine that miscounts only makes itself look full.
        """
        if self.report is not None and report.sequence <= self.report.sequence:
            return False
        report = self._clamped(report)
        before = 0 if self.report is None else self.report.steps
        empty = report.state == engine_pb2.ENGINE_STATE_SERVING and not report.running + report.waiting
        # A stalled engine has lost its sequences, and need not know of them.
        if report.steps > before or (empty and (self.stalled or not self.placed_sequences)):
            self.stepped(self.last_heard)
        self.report = report
        self.full = report.kept
        self.reported_at = self.last_heard
        self.state = report.state
        self.foreign_sequences = max(0, report.running + report.waiting - self.placed_sequences)
        held = report.used_blocks * self.capacity.block_size + report.pending_prefill_tokens
        self.foreign_tokens = max(0, held - self.placed_tokens)
        self.kv.report(held)
        self.foreign_prefill = max(0, report.pending_prefill_tokens - self.placed_prefill)
        return True

    def _clamped(self, report: engine_pb2.LoadReport) -> engine_pb2.LoadReport:
        capacity = self.capacity
        running = min(report.running, capacity.max_running)
        # ClassQuota to run that are free may be promised to sequences that wait for the next step.
        sequences = capacity.max_running + capacity.max_waiting
        return engine_pb2.LoadReport(
            sequence=report.sequence,
            state=report.state,
            running=running,
            waiting=min(report.waiting, sequences - running),
            used_blocks=min(report.used_blocks, capacity.total_blocks),
            total_blocks=min(report.total_blocks, capacity.total_blocks),
            pending_prefill_tokens=min(report.pending_prefill_tokens, sequences * self.model.max_model_len),
            steps=report.steps,
            generated_tokens=report.generated_tokens,
            prompt_tokens=report.prompt_tokens,
            cached_prompt_tokens=min(report.cached_prompt_tokens, report.prompt_tokens),
            preemptions=report.preemptions,
            kept=report.kept,
        )
