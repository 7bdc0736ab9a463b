"""The device's part of a step, run on the device's stream."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from services.engine.bucketing import Bucket
from services.engine.device import Device
from services.engine.graphs import Graphs, Phase, PhaseWork
from services.engine.model.paged import PagedModel
from services.engine.runner.packing import PackedCopy
from services.engine.runner.phases import Phases
from services.engine.runner.prompts import PromptRequests
from services.engine.sampling import RowParams, SamplerInputs, prompt_logprobs, sample
from services.engine.tracing import StepTracer

Tensors = tuple[torch.Tensor, ...]


@dataclass(slots=True)
class StepInputs:
    """A step's inputs on the device. None: the step has no such part."""

    # Sources and targets of block copies.
    moves: Tensors | None = None
    clear: torch.Tensor | None = None
    prefill: tuple[Bucket, Tensors] | None = None
    prompts: PromptRequests | None = None
    decode: tuple[Bucket, Tensors] | None = None
    sampled: list[RowParams] = field(default_factory=list)
    # The sequences' rows of the last tokens, padded to a static count, and what sampling needs beside them.
    sampling: tuple[torch.Tensor, SamplerInputs] | None = None
    # What the forwards compute, for traces.
    work: dict[Phase, PhaseWork] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the device hands over. The parts of `copy`, as far as the step has them: bool [B], whether each
    row of the prefill went well; packed scores of prompt tokens; packed samples.
    """

    copy: PackedCopy
    has_prefill: bool
    has_prompts: bool
    has_samples: bool


class StepExecutor:
    """Runs steps whose inputs are on the device."""

    def __init__(
        self, model: PagedModel, device: Device, graphs: Graphs, phases: Phases, tracer: StepTracer
    ) -> None:
        self._model = model
        self._device = device
        self._graphs = graphs
        self._phases = phases
        self._tracer = tracer

    @torch.inference_mode()
    def run(self, inputs: StepInputs, step: int) -> StepOutput:
        """Computes a step up to its copy to the host, which is begun."""
        with self._tracer.span("step", step) as span, self._device.step(step):
            compilations = 0 if span is None else self._device.compilations()
            with self._tracer.span("forward"):
                parts = self.forward(inputs)
            if inputs.sampling is not None:
                with self._tracer.span("sample"):
                    parts.append(self._sample(*inputs.sampling))
            with self._tracer.span("copy"):
                copy = PackedCopy(self._device, parts)
            if span is not None:
                # A lazy device compiles when it is flushed, which may be in none of the forwards.
                span.args["compilations"] = self._device.compilations() - compilations
        return StepOutput(
            copy, inputs.prefill is not None, inputs.prompts is not None, inputs.sampling is not None
        )

    def forward(self, inputs: StepInputs) -> list[torch.Tensor]:
        """All of a step but its sampling. Returns what the prefill has to tell."""
        parts: list[torch.Tensor] = []
        if inputs.moves is not None:
            count = inputs.moves[0].shape[0]
            self._graphs.run(Phase.MOVE, count, self._model.copy_blocks, inputs.moves)
        if inputs.clear is not None:
            # A masked slot counts nothing only while it holds a number: 0 * NaN is NaN. So what the last
            # owner left has to go, however it ended, when the next one begins a block; and the padding block
            # before each prefill, whose context it fills up. A decode reads that block too, for rows that are
            # dropped.
            self._graphs.run(Phase.CLEAR, inputs.clear.shape[0], self._model.clear_blocks, (inputs.clear,))
        if inputs.prefill is not None:
            bucket, tensors = inputs.prefill
            hidden, harmless = self._graphs.run(
                Phase.PREFILL, bucket, self._phases.prefill, tensors, inputs.work.get(Phase.PREFILL)
            )
            parts.append(harmless)
            if inputs.prompts is not None:
                parts.append(self._score(hidden, inputs.prompts))
        if inputs.decode is not None:
            bucket, tensors = inputs.decode
            self._graphs.run(
                Phase.DECODE, bucket, self._phases.decode, tensors, inputs.work.get(Phase.DECODE)
            )
        return parts

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size], R one of the static counts -> logits [R, vocab_size]."""
        logits: torch.Tensor = self._graphs.run(Phase.HEAD, hidden.shape[0], self._phases.head, (hidden,))
        return logits

    def _sample(self, last_rows: torch.Tensor, inputs: SamplerInputs) -> torch.Tensor:
        """Samples the first hidden states and keeps the tokens for the next step. Returns what is packed."""
        logits = self.head(self._phases.hidden[: last_rows.shape[0]])
        batch = sample(logits, inputs, self._phases.last_tokens, self._device)
        self._phases.keep_tokens(last_rows, batch.tokens)
        return batch.packed

    def _score(self, hidden: torch.Tensor, requests: PromptRequests) -> torch.Tensor:
        """Packed scores of prompt tokens, slice by slice: the logits of a whole chunk would be large."""
        parts: list[torch.Tensor] = []
        for start in range(0, requests.picks.shape[0], requests.rows):
            picks = requests.picks[start : start + requests.rows]
            targets = requests.targets[start : start + requests.rows]
            logits = self.head(hidden.index_select(0, picks))
            parts.append(prompt_logprobs(logits, targets, requests.alternatives, self._device))
        return torch.cat(parts)
