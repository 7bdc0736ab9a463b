"""The device's part of a step, run on the device's stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from services.engine.bucketing import Bucket
from services.engine.device import Device, Forward, Submitted
from services.engine.graphs import Graphs, Key, Phase, PhaseWork
from services.engine.model.paged import PagedModel
from services.engine.runner.phases import Phases
from services.engine.runner.staging import Staged
from services.engine.runner.tail import StepCopy, StepTail, Tails
from services.engine.sampling import RowParams
from services.engine.tracing import StepTracer


@dataclass(slots=True)
class StepInputs:
    """A step's inputs on the device. None: the step has no such part."""

    tail: StepTail
    # Sources, targets and tokens of block copies.
    moves: Staged | None = None
    clear: Staged | None = None
    prefill: tuple[Bucket, Staged] | None = None
    # Whether tokens of prompts are scored.
    scores: bool = False
    decode: tuple[Bucket, Staged] | None = None
    sampled: list[RowParams] = field(default_factory=list)
    # What the forwards compute, for traces.
    work: dict[Phase, PhaseWork] = field(default_factory=dict)


class StepExecutor:
    """Runs steps whose inputs are on the device."""

    def __init__(
        self,
        model: PagedModel,
        device: Device,
        graphs: Graphs,
        phases: Phases,
        tails: Tails,
        tracer: StepTracer,
    ) -> None:
        self._model = model
        self._device = device
        self._graphs = graphs
        self._phases = phases
        self._tails = tails
        self._tracer = tracer

    @torch.inference_mode()
    def run(self, inputs: StepInputs, step: int) -> StepCopy:
        """Computes a step up to its copy to the host, which is begun."""
        turns = self._phases.turns
        turns.begins(step)
        try:
            return self._whole(inputs, step)
        finally:
            turns.ended(step)

    def _whole(self, inputs: StepInputs, step: int) -> StepCopy:
        with self._tracer.span("step", step) as span, self._device.step(step):
            compilations = 0 if span is None else self._device.compilations()
            with self._tracer.span("forward"):
                self.forward(inputs)
            if inputs.sampled:
                with self._tracer.span("sample"):
                    inputs.tail.sample()
            with self._tracer.span("copy"):
                copy = inputs.tail.copy()
            if span is not None:
                # A lazy device compiles when it is flushed, which may be in none of the forwards.
                span.args["compilations"] = self._device.compilations() - compilations
        return copy

    @torch.inference_mode()
    def begin(self, inputs: StepInputs, step: int) -> None:
        """Computes a step's forwards: what comes before `end`."""
        turns = self._phases.turns
        turns.begins(step)
        try:
            with self._tracer.span("step", step), self._device.step(step), self._tracer.span("forward"):
                self.forward(inputs)
        finally:
            # The rest waits for masks, and these for the step before.
            turns.computed(step)

    @torch.inference_mode()
    def end(self, inputs: StepInputs, step: int, begun: Submitted[None]) -> StepCopy:
        """Computes the rest of a step whose forwards were submitted before. Raises what they raised."""
        try:
            begun.result()
            with self._tracer.span("tail", step), self._device.step(step):
                with self._tracer.span("sample"):
                    inputs.tail.sample()
                with self._tracer.span("copy"):
                    return inputs.tail.copy()
        finally:
            self._phases.turns.ended(step)

    @torch.inference_mode()
    def rehearse(self, inputs: StepInputs) -> None:
        """Computes a step of padding."""
        self.forward(inputs)
        inputs.tail.sample()

    def forward(self, inputs: StepInputs) -> None:
        """All of a step but its sampling."""
        if inputs.moves is not None:
            self._run(Phase.MOVE, inputs.moves.sections[0][1], self._model.copy_blocks, inputs.moves)
        if inputs.clear is not None:
            # A masked slot counts nothing only while it holds a number: 0 * NaN is NaN. So what the last
            # owner left has to go, however it ended, when the next one begins a block; and the padding block
            # before each prefill, whose context it fills up. A decode reads that block too, for rows that are
            # dropped.
            self._run(Phase.CLEAR, inputs.clear.sections[0][1], self._model.clear_blocks, inputs.clear)
        if inputs.prefill is not None:
            bucket, staged = inputs.prefill
            forward = self._tails.prefill if inputs.scores else self._tails.prefill_sampled
            result = self._run(Phase.PREFILL, bucket, forward, staged, inputs.work.get(Phase.PREFILL))
            inputs.tail.after_prefill(result)
        if inputs.decode is not None:
            bucket, staged = inputs.decode
            work, prepared = inputs.work.get(Phase.DECODE), inputs.tail.decoding
            if prepared is None:
                self._run(Phase.DECODE, bucket, self._phases.decode, staged, work)
            else:
                self._graphs.run(Phase.DECODE, bucket, prepared, (staged.tensor,), work)

    def _run(
        self, phase: Phase, key: Key, forward: Forward, staged: Staged, work: PhaseWork | None = None
    ) -> Any:
        return self._graphs.run(phase, key, staged.taking(forward), (staged.tensor,), work)
