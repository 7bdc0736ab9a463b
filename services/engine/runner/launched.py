"""A step that is on its way, and what it gives."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.engine.device import Submitted
from services.engine.runner.prompts import PromptScores, read_scores
from services.engine.runner.tail import StepCopy
from services.engine.sampling import RowParams, SampledToken, unpack
from services.engine.scheduler import Sequence, StepPlan


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave.

    sampled: one entry for each sequence of `StepPlan.sampling()`, in its order. broken: sequences of which a
    prefill wrote KV that is not a number; what else the step gave for them is void. prompts: scores of prompt
    tokens, of those that asked.
    """

    sampled: tuple[tuple[Sequence, SampledToken], ...]
    broken: tuple[Sequence, ...] = ()
    prompts: tuple[PromptScores, ...] = ()


class LaunchedStep:
    """A step that the device computes or will compute. Steps finish in the order of their launch.

    `number` counts launched steps from 1.
    """

    def __init__(self, number: int, plan: StepPlan, rows: list[RowParams], work: Submitted[StepCopy]) -> None:
        self.number = number
        self.plan = plan
        self._rows = rows
        self._work = work
        self.finished = False

    def result(self) -> StepResult:
        """Waits for the step. Raises what it raised."""
        try:
            parts = self._work.result().wait()
        finally:
            self.finished = True
        broken = () if parts.harmless is None else self._broken(parts.harmless)
        prompts = () if parts.prompts is None else read_scores(parts.prompts, self.plan.prefills)
        if parts.samples is None:
            return StepResult((), broken, prompts)
        tokens = unpack(parts.samples, self._rows)
        return StepResult(tuple(zip(self.plan.sampling(), tokens, strict=True)), broken, prompts)

    def _broken(self, harmless: torch.Tensor) -> tuple[Sequence, ...]:
        # Rows of padding follow.
        good = harmless.tolist()[: len(self.plan.prefills)]
        return tuple(chunk.sequence for chunk, fine in zip(self.plan.prefills, good, strict=True) if not fine)
