"""A step that is on its way, and what it gives."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.engine.device import Submitted
from services.engine.runner.packing import PackedCopy
from services.engine.sampling import RowParams, SampledToken, unpack
from services.engine.scheduler import Sequence, StepPlan


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave.

    sampled: one entry for each sequence of `StepPlan.sampling()`, in its order. broken: sequences of which a
    prefill wrote KV that is not a number; what they sampled is void.
    """

    sampled: tuple[tuple[Sequence, SampledToken], ...]
    broken: tuple[Sequence, ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the device's part of a step hands over; the parts of `copy` follow the fields that are set."""

    copy: PackedCopy
    has_prefill: bool
    has_samples: bool


class LaunchedStep:
    """A step that the device computes or will compute. Steps finish in the order of their launch.

    `number` counts launched steps from 1.
    """

    def __init__(
        self, number: int, plan: StepPlan, rows: list[RowParams], work: Submitted[StepOutput]
    ) -> None:
        self.number = number
        self.plan = plan
        self._rows = rows
        self._work = work
        self.finished = False

    def result(self) -> StepResult:
        """Waits for the step. Raises what it raised."""
        try:
            output = self._work.result()
            parts = output.copy.wait()
        finally:
            self.finished = True
        broken: tuple[Sequence, ...] = ()
        sampled: tuple[tuple[Sequence, SampledToken], ...] = ()
        if output.has_prefill:
            broken = self._broken(parts.pop(0))
        if output.has_samples:
            tokens = unpack(parts.pop(0), self._rows)
            sampled = tuple(zip(self.plan.sampling(), tokens, strict=True))
        return StepResult(sampled, broken)

    def _broken(self, harmless: torch.Tensor) -> tuple[Sequence, ...]:
        return tuple(
            chunk.sequence
            for chunk, good in zip(self.plan.prefills, harmless.tolist(), strict=False)
            if not good
        )
