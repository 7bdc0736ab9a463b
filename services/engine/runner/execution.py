"""The device's part of a step: forwards of static shape around the buffers that outlive it.

Threads of Python run one at a time. What a loop does with a step's result would keep the device's own
thread, where there is one, from beginning the next forward, which waits for nothing else; during a forward
the device does not wait.

Hidden states of rows that sample wait in `hidden` for the head, and tokens in `last_tokens` for the next
step, which therefore needs no word from the host about them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from services.engine.bucketing import Bucket
from services.engine.device import Device, Forward, Submitted
from services.engine.graphs import Graphs, Key, Phase, PhaseWork
from services.engine.model.paged import PagedModel
from services.engine.runner.batches import PENDING, KvLayout, Staged
from services.engine.runner.tail import StepCopy, StepTail, Tails
from services.engine.sampling import RowParams, StaticBuffers
from services.engine.tracing import StepTracer


class StepGate:
    """Gate in front of each step's result, by the step's number, from 1.

    `wait` apart, methods are quick, and called from the loop's or the device's thread.
    """

    def __init__(self) -> None:
        self._given = 0
        self._open: dict[int, threading.Event] = {}
        self.forward_begins: Callable[[], None] = lambda: None
        """Called as the device is about to compute a forward."""

    def __len__(self) -> int:
        """Number of steps that were given and not looked at."""
        return len(self._open)

    def waits(self, step: int) -> bool:
        """Return whether `wait` would wait now."""
        event = self._open.get(step)
        return event is not None and not event.is_set()

    def given(self, step: int) -> None:
        """Note that the device is about to be given a step."""
        self._open[step] = threading.Event()
        self._given = step

    def begins(self, step: int) -> None:
        """Note that the device begins a step: with its first forward the one before may be looked at."""
        self.forward_begins = lambda: self._let(step - 1)

    def computed(self, step: int) -> None:
        """Note that a step's forwards are computed. A replayed graph does not call `forward_begins`."""
        self._let(step - 1)

    def ended(self, step: int) -> None:
        """Note that the device is done with a step, or will never compute it."""
        self._let(step - 1)
        if self._given == step:
            self._let(step)

    def wait(self, step: int) -> None:
        """Wait until a step that was given may be looked at."""
        if (event := self._open.get(step)) is not None:
            event.wait()
            del self._open[step]

    def _let(self, step: int) -> None:
        if (event := self._open.get(step)) is not None:
            event.set()


class Phases:
    """The computations that a step is made of, for up to `max_rows` rows. `spare_row` takes padding.

    hidden [max_rows + 1, hidden_size]; last_tokens int64 [max_rows + 1], by `Sequence.row`.
    """

    def __init__(self, model: PagedModel, device: Device, layout: KvLayout, max_rows: int) -> None:
        self._model = model
        self._layout = layout
        self.gate = StepGate()
        self.chooser = model.chooser
        self.spare_row = max_rows
        self.hidden = device.memory.zeros((max_rows + 1, model.hidden_size), model.dtype)
        self.last_tokens = device.memory.zeros((max_rows + 1,), torch.int64)

    def prefill(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute chunks of prompts. `tensors`: as `BatchBuilder.prefill` lays them out.

        Returns hidden states [B * Q, hidden_size], and bool [B]: whether those of the row's own tokens are
        all numbers. A key or value that is not shows in its token's hidden state.
        """
        tokens, positions, slots, blocks, context_lens, picks, targets = tensors
        batch = context_lens.shape[0]
        context_blocks = blocks.view(batch, blocks.shape[0] // batch)
        self.gate.forward_begins()
        hidden = self._model.prefill(tokens, positions, slots, context_blocks, context_lens)
        self.hidden.index_copy_(0, targets, hidden.index_select(0, picks))
        # Not by the maximum: whether that is NaN where one of the numbers is, a device need not say.
        harmless = hidden.isfinite().all(-1) | (slots >= self._layout.padding_start)
        return hidden, harmless.view(batch, -1).all(-1)

    def prefill_sampled(self, *tensors: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Compute as `prefill` does, where the returned hidden states are not needed: they may be None."""
        select = self._model.select
        if select is None:
            return self.prefill(*tensors)
        tokens, positions, slots, blocks, context_lens, picks, targets = tensors
        batch = context_lens.shape[0]
        context_blocks = blocks.view(batch, blocks.shape[0] // batch)
        sampled = targets != self.spare_row
        self.gate.forward_begins()
        hidden, sound = select(tokens, positions, slots, context_blocks, context_lens, picks[sampled])
        self.hidden.index_copy_(0, targets[sampled], hidden)
        return None, sound.view(batch, -1).all(-1)

    def prefill_static(self, buffers: StaticBuffers) -> Callable[..., None]:
        """Return `prefill` for a device of static shapes, with its results in these buffers instead."""

        def run(*tensors: torch.Tensor) -> None:
            hidden, harmless = self.prefill(*tensors)
            for buffer, values in ((buffers.chunk, hidden), (buffers.harmless, harmless)):
                rows = torch.arange(values.shape[0], device=values.device)
                buffer.index_copy_(0, rows, values.to(buffer.dtype))

        return run

    def decode(self, *tensors: torch.Tensor) -> None:
        """Compute one token for each row. `tensors`: as `BatchBuilder.decode` lays them out."""
        given, positions, slots, blocks, owners, starts, last_rows, targets = tensors
        tokens = torch.where(given == PENDING, self.last_tokens.index_select(0, last_rows), given)
        self.gate.forward_begins()
        hidden = self._model.decode(tokens, positions, slots, blocks, owners, starts)
        self.hidden.index_copy_(0, targets, hidden)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [R, vocab_size] of hidden [R, hidden_size]."""
        return self._model.logits(hidden)

    def keep_tokens(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Make int64 [R] tokens the last ones of these rows."""
        self.last_tokens.index_copy_(0, rows, tokens)


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
    # Work of the forwards, for traces.
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
        """Compute a step up to its copy to the host, which is begun."""
        gate = self._phases.gate
        gate.begins(step)
        try:
            return self._whole(inputs, step)
        finally:
            gate.ended(step)

    def _whole(self, inputs: StepInputs, step: int) -> StepCopy:
        with self._tracer.span("step", step) as span, self._device.execution.step(step):
            compilations = 0 if span is None else self._device.execution.compilations()
            with self._tracer.span("forward"):
                self.forward(inputs)
            if inputs.sampled:
                with self._tracer.span("sample"):
                    inputs.tail.sample()
            with self._tracer.span("copy"):
                copy = inputs.tail.copy()
            if span is not None:
                # A lazy device compiles when it is flushed, which may be in none of the forwards.
                span.args["compilations"] = self._device.execution.compilations() - compilations
        return copy

    @torch.inference_mode()
    def begin(self, inputs: StepInputs, step: int) -> None:
        """Compute a step's forwards; `end` computes the rest."""
        gate = self._phases.gate
        gate.begins(step)
        try:
            with (
                self._tracer.span("step", step),
                self._device.execution.step(step),
                self._tracer.span("forward"),
            ):
                self.forward(inputs)
        finally:
            # The rest waits for masks, and these for the step before.
            gate.computed(step)

    @torch.inference_mode()
    def end(self, inputs: StepInputs, step: int, begun: Submitted[None]) -> StepCopy:
        """Compute the rest of a step whose forwards were submitted before. Raises their error."""
        try:
            begun.result()
            with self._tracer.span("tail", step), self._device.execution.step(step):
                with self._tracer.span("sample"):
                    inputs.tail.sample()
                with self._tracer.span("copy"):
                    return inputs.tail.copy()
        finally:
            self._phases.gate.ended(step)

    @torch.inference_mode()
    def rehearse(self, inputs: StepInputs) -> None:
        """Compute a step of padding."""
        self.forward(inputs)
        inputs.tail.sample()

    def forward(self, inputs: StepInputs) -> None:
        """Compute all of a step but its sampling."""
        if inputs.moves is not None:
            self._run(Phase.MOVE, inputs.moves.sections[0][1], self._model.copy_blocks, inputs.moves)
        if inputs.clear is not None:
            # A masked slot counts nothing only while it holds a number: 0 * NaN is NaN. So the values
            # of the last owner, however it ended, are cleared when the next one begins a block; and the
            # padding block before each prefill, whose context it fills up. A decode reads that block too, for
            # rows that are dropped.
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
