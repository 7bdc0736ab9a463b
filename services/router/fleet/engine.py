"""One attached engine as this router knows it."""

from __future__ import annotations

from dataclasses import dataclass

from catenary.v1 import common_pb2, engine_pb2


@dataclass(slots=True, eq=False)
class Engine:
    """An attachment: facts of the hello, the last report, and what this router has placed on it.

    A new attachment of the same engine process is a new `Engine` with a higher epoch; the old one is never
    revived.
    """

    instance_id: str
    name: str
    version: str
    device: str
    model: common_pb2.ModelInfo
    capacity: engine_pb2.Capacity
    epoch: int
    state: engine_pb2.EngineState.ValueType
    last_heard: float
    # None until the first one of this epoch.
    report: engine_pb2.LoadReport | None = None
    # Kept by LoadGuard alone.
    placed_sequences: int = 0
    placed_tokens: int = 0
    # What the last report holds beyond this router's placements: other routers' work, and how far ours has
    # grown beyond its prompts.
    foreign_sequences: int = 0
    foreign_tokens: int = 0

    @property
    def serving(self) -> bool:
        """Takes sequences."""
        return self.state == engine_pb2.ENGINE_STATE_SERVING

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

    def has_room(self, sequences: int = 1) -> bool:
        """False when so many more would be refused for the time being: more than run at once always are."""
        needed = min(sequences, self.capacity.max_running)
        return self.sequences + needed <= self.capacity.max_running + self.capacity.max_waiting

    def heard(self, now: float) -> None:
        """Renew the lease: a valid message came at monotonic time `now`."""
        self.last_heard = now

    def apply(self, report: engine_pb2.LoadReport) -> bool:
        """Take a report over. False, and nothing changed, if it is not newer than the last one.

        What is beyond the capacity of the hello counts as that capacity: sums over engines stay sensible, and
        an engine that miscounts only makes itself look full.
        """
        if self.report is not None and report.sequence <= self.report.sequence:
            return False
        report = self._clamped(report)
        self.report = report
        self.state = report.state
        self.foreign_sequences = max(0, report.running + report.waiting - self.placed_sequences)
        held = report.used_blocks * self.capacity.block_size + report.pending_prefill_tokens
        self.foreign_tokens = max(0, held - self.placed_tokens)
        return True

    def _clamped(self, report: engine_pb2.LoadReport) -> engine_pb2.LoadReport:
        capacity = self.capacity
        running = min(report.running, capacity.max_running)
        # Places to run that are free may be promised to sequences that wait for the next step.
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
        )
