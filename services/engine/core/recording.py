"""Feeds the recorder from the core's loop: the lengths of sequences that ended, and what steps took."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from services.engine.bucketing import Recorder
from services.engine.scheduler import Finished, Outcome, Scored, StepPlan


class ServingRecorder:
    """Records into a file, or nothing without one.

    Steps overlap: one waits for the step before it. So a step's time counts from its launch, or from the end
    of the step before if that was later.
    """

    def __init__(self, path: Path | None) -> None:
        """Raises ValueError if the file cannot be written."""
        self._recorder = None if path is None else Recorder(path)
        self._launches: dict[int, float] = {}
        self._ended = 0.0

    def launched(self, number: int) -> None:
        """Notes that a step was launched."""
        if self._recorder is not None:
            self._launches[number] = time.perf_counter()

    def ended(self, number: int, plan: StepPlan, *, whole: bool) -> None:
        """Notes that a step ended. `whole`: it computed what was planned, and nothing else ran beside it."""
        if self._recorder is None:
            return
        now = time.perf_counter()
        begun = max(self._launches.pop(number), self._ended)
        self._ended = now
        if whole:
            self._recorder.step(plan.bucket_prefill, plan.bucket_decode, now - begun)

    def outcomes(self, outcomes: Iterable[Outcome | Scored]) -> None:
        """Notes the lengths of the sequences that ended with these outcomes of a step."""
        if self._recorder is None:
            return
        for outcome in outcomes:
            if isinstance(outcome, Finished):
                sequence = outcome.sequence
                self._recorder.sequence(sequence.prompt_len, sequence.num_generated_tokens)

    def idle(self) -> None:
        """Writes what is buffered, while nothing waits for it."""
        if self._recorder is not None:
            self._recorder.flush()
