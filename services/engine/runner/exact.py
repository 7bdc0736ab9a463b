"""The tail of a step where shapes cost nothing: what a step does not need is not computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

import torch

from services.engine.device import Device, Forward, HostCopy
from services.engine.graphs import Graphs, Phase
from services.engine.runner.execution import Phases
from services.engine.runner.tail import StepParts, TailRequest, scored_places, slice_rows
from services.engine.sampling import (
    Call,
    Counts,
    ExactStages,
    MaskBuffer,
    Program,
    SamplingCalls,
    TokenMasks,
)

# So many logits are few: greedy rows are looked through once, drawn ones may be sorted.
_FEW: Final = 1 << 21
_FEW_DRAWN: Final = 1 << 17

BestTokens = tuple[torch.Tensor, torch.Tensor]
"""The best tokens of rows, int64 [R], and their logits [R]."""


class ExactTails:
    """Implements `Tails`: logits come in static shapes, what follows them does not."""

    def __init__(
        self, phases: Phases, device: Device, graphs: Graphs, vocab_size: int, row_counts: tuple[int, ...]
    ) -> None:
        self.phases = phases
        self.device = device
        self._graphs = graphs
        self._row_counts = row_counts
        counts = Counts.powers(row_counts, vocab_size)
        self.program = Program(device, vocab_size, counts, slice_rows(row_counts), 0)

    @property
    def counts(self) -> Mapping[Phase, tuple[int, ...]]:
        return {Phase.HEAD: self._row_counts}

    @property
    def prefill(self) -> Forward:
        return self.phases.prefill

    @property
    def prefill_sampled(self) -> Forward:
        return self.phases.prefill_sampled

    @property
    def bytes(self) -> int:
        return 0

    def prepare(self, request: TailRequest) -> ExactTail:
        scores: list[Call] = []
        if (places := scored_places(request.prefills, request.query)) is not None:
            most = max(chunk.sequence.params.sampling.prompt_logprobs for chunk in request.prefills)
            scores = self.program.scores(*places, 1, alternatives=most > 0)
        sampling = SamplingCalls()
        if request.sampled:
            sampling = self.program.sampling(request.sampled, request.last_rows)
        step = None
        if request.decodes is not None and self.phases.chooser is not None and sampling.greedy:
            # Beside the forward before, so that little is left to do between the two.
            *decode, last_rows, _targets = request.decodes.tensors()
            kept = self.phases.last_tokens
            step = self.phases.chooser.best_step(decode, len(request.sampled), last_rows, kept)
        return ExactTail(self, scores, sampling, request, step)

    def dummy(self, phase: Phase, count: int) -> ExactTail:
        return ExactTail(self, [], SamplingCalls(scores=[self.program.dummy(phase, count)]))

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size], R one of the static counts -> logits [R, vocab_size]."""
        logits: torch.Tensor = self._graphs.run(Phase.HEAD, hidden.shape[0], self.phases.head, (hidden,))
        return logits

    def best(self, last_rows: torch.Tensor, rows: int) -> BestTokens:
        """Choose the best tokens of the first `rows` hidden states, and keep them as those of `last_rows`.

        last_rows int64 [R], R one of the static counts.
        """
        chooser = self.phases.chooser
        if chooser is None:
            raise ValueError("the model has no kernel that chooses")

        def choose(hidden: torch.Tensor) -> BestTokens:
            return chooser.choose(hidden[:rows])

        count = last_rows.shape[0]
        tokens, logits = self._graphs.run(Phase.HEAD, count, choose, (self.phases.hidden[:count],))
        self.phases.keep_tokens(last_rows[:rows], tokens)
        return tokens, logits


class ExactTail:
    """Implements `StepTail`. step: in place of all else, computes the best tokens and their logits."""

    def __init__(
        self,
        tails: ExactTails,
        scores: Sequence[Call],
        sampling: SamplingCalls,
        request: TailRequest | None = None,
        step: Callable[[], BestTokens] | None = None,
    ) -> None:
        phases = tails.phases
        self._tails = tails
        self._scores = scores
        self._sampling = sampling
        self._request = request
        self._step = step
        self._masks: Sequence[Call] = ()
        self._stages = ExactStages(self._head, phases.hidden, phases.last_tokens, tails.device)
        self._few = 0
        self._small = ExitStack()
        self._harmless: torch.Tensor | None = None
        self._samples: torch.Tensor | None = None
        self._best: BestTokens | None = None

    @property
    def decoding(self) -> Forward | None:
        return None if self._step is None else self._decode_best

    def _decode_best(self, _staged: torch.Tensor) -> None:
        if self._step is not None:
            self._tails.phases.gate.forward_begins()
            self._best = self._step()

    def after_prefill(self, result: Any) -> None:
        self._stages.chunk, self._harmless = result
        self._run(self._scores)

    def restrict(self, masks: TokenMasks, buffer: MaskBuffer) -> None:
        request, program = self._request, self._tails.program
        if request is None or not request.sampled:
            raise ValueError("masks for a step that samples nothing")
        if self._sampling.greedy:
            self._sampling = program.sampling(request.sampled, request.last_rows, masked=True)
        buffer.clear()
        self._masks = program.masks(masks, buffer)

    def sample(self) -> None:
        if self._best is not None:
            return
        tails, sampling = self._tails, self._sampling
        if sampling.greedy and tails.phases.chooser is not None and self._request is not None:
            (last_rows,) = sampling.tokens[0].tensors
            if last_rows is not None:
                self._best = tails.best(last_rows, len(self._request.sampled))
            return
        self._few = _FEW_DRAWN if sampling.draws else _FEW
        with self._small:
            self._run((*sampling.scores, *self._masks, *sampling.tokens))
        if sampling.tokens:
            self._samples = self._stages.packed()

    def copy(self) -> PackedCopy:
        prompts = torch.cat(self._stages.prompts) if self._stages.prompts else None
        return PackedCopy(self._tails.device, (self._harmless, prompts, self._samples), self._best)

    def _run(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self._stages.run(call)

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._tails.head(hidden)
        if logits.numel() <= self._few:
            self._small.enter_context(self._tails.device.stream.small_work())
        return logits


class PackedCopy:
    """Several tensors on their way to the host as one, in the widest float: ids below 2**24 stay exact.

    best: is on the host already, where all devices compute that choose.
    """

    def __init__(
        self,
        device: Device,
        parts: Sequence[torch.Tensor | None],
        best: BestTokens | None = None,
    ) -> None:
        self._shapes = [None if part is None else part.shape for part in parts]
        self._copy: HostCopy | None = None
        if flat := [part.flatten().to(device.capabilities.wide_dtype) for part in parts if part is not None]:
            self._copy = device.stream.begin_to_host(torch.cat(flat) if len(flat) > 1 else flat[0])
        self._best = best

    def wait(self) -> StepParts:
        """Return the tensors on the host, once they are there, in their shapes."""
        harmless, prompts, samples = self._parts()
        return StepParts(harmless, prompts, samples, self._best)

    def _parts(self) -> list[torch.Tensor | None]:
        if self._copy is None:
            return [None] * len(self._shapes)
        host, start = self._copy.wait(), 0
        parts: list[torch.Tensor | None] = []
        for shape in self._shapes:
            if shape is None:
                parts.append(None)
                continue
            parts.append(host[start : start + shape.numel()].view(shape))
            start += shape.numel()
        return parts
