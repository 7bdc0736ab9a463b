"""A step that is on its way, and what it gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.engine.device import Submitted
from services.engine.runner.prompts import PromptScores, read_scores
from services.engine.runner.tail import StepCopy
from services.engine.sampling import RowParams, SampledToken, TokenMasks, read_best, unpack
from services.engine.scheduler import Sequence, StepPlan


class PlanError(Exception):
    """A defect: a plan that does not fit its buckets, or a step that comes too early."""


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

    `wait`: returns once its result may be asked for.
    `number` counts launched steps from 1. One of which the device has the forwards alone has no `work` yet,
    and `rest` submits what is left.
    """

    def __init__(
        self,
        number: int,
        plan: StepPlan,
        rows: list[RowParams],
        wait: Callable[[], None],
        work: Submitted[StepCopy] | None = None,
        rest: Callable[[TokenMasks | None], Submitted[StepCopy]] | None = None,
    ) -> None:
        self.number = number
        self.plan = plan
        self._rows = rows
        self._wait = wait
        self._work = work
        self._rest = rest
        self.finished = False

    @property
    def awaits_masks(self) -> bool:
        """True until `sample` of a step that was launched in part."""
        return self._rest is not None

    def sample(self, masks: TokenMasks | None) -> None:
        """Gives the device the rest of the step. `masks` of its rows, None: nothing is masked after all.

        What goes wrong is raised by `result`. Call it once, if `awaits_masks`, before another launch.
        """
        if self._rest is None:
            raise PlanError("the rest of a step is launched twice")
        self._work, self._rest = self._rest(masks), None

    def result(self) -> StepResult:
        """Waits for the step. Raises what it raised."""
        if self._work is None:
            raise PlanError("a step is awaited that was launched in part")
        try:
            self._wait()
            parts = self._work.result().wait()
        finally:
            self.finished = True
        broken = () if parts.harmless is None else self._broken(parts.harmless)
        prompts = () if parts.prompts is None else read_scores(parts.prompts, self.plan.prefills)
        if parts.best is not None:
            tokens = read_best(*parts.best)
        elif parts.samples is not None:
            tokens = unpack(parts.samples, self._rows)
        else:
            return StepResult((), broken, prompts)
        return StepResult(tuple(zip(self.plan.sampling(), tokens, strict=True)), broken, prompts)

    def _broken(self, harmless: torch.Tensor) -> tuple[Sequence, ...]:
        # Rows of padding follow.
        good = harmless.tolist()[: len(self.plan.prefills)]
        return tuple(chunk.sequence for chunk, fine in zip(self.plan.prefills, good, strict=True) if not fine)
