"""The tail of a step where shapes cost nothing: what a step does not need is not computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Final

import torch

from services.engine.device import Chooser, Device, Forward, HostCopy
from services.engine.graphs import Graphs, Phase
from services.engine.runner.batches import BatchBuilder, Staged, padded_count
from services.engine.runner.execution import Phases
from services.engine.runner.tail import PromptRequests, StepParts, TailRequest, request_scores, slice_rows
from services.engine.sampling import (
    MaskBuffer,
    SamplerInputs,
    TokenMasks,
    prepare,
    prompt_logprobs,
    sample,
    with_masks,
)

# So many logits are few: greedy rows are looked through once, drawn ones may be sorted.
_FEW: Final = 1 << 21
_FEW_DRAWN: Final = 1 << 17


class DynamicTails:
    """Implements `Tails`: logits come in static shapes, what follows them does not."""

    def __init__(
        self,
        phases: Phases,
        device: Device,
        graphs: Graphs,
        builder: BatchBuilder,
        vocab_size: int,
        row_counts: tuple[int, ...],
    ) -> None:
        self.phases = phases
        self.device = device
        self._graphs = graphs
        self._builder = builder
        self._vocab_size = vocab_size
        self._row_counts = row_counts

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

    def prepare(self, request: TailRequest) -> DynamicTail:
        prompts: PromptRequests | None = None
        if request.prefills:
            rows = slice_rows(self._row_counts)
            prompts = request_scores(request.prefills, request.query, rows, request.staging.prompts)
        if not request.sampled:
            return DynamicTail(self, prompts, None)
        count = padded_count(len(request.sampled), self._row_counts)
        inputs = prepare(request.sampled, count, self._vocab_size, self.device)
        if request.decodes is not None and self.phases.chooser is not None and inputs.greedy:
            # Beside the forward before, so that little is left to do between the two.
            *decode, last_rows, _targets = request.decodes.tensors()
            count, kept = len(request.sampled), self.phases.last_tokens
            step = self.phases.chooser.best_step(decode, count, last_rows, kept)
            return DynamicTail(self, None, None, step=step)
        last = self._builder.ids(request.last_rows, self.phases.spare_row, count, request.staging.rows)
        return DynamicTail(self, prompts, (last, inputs), rows=len(request.sampled))

    def dummy(self, phase: Phase, count: int) -> DynamicTail:
        return DynamicTail(self, None, None, dummy_rows=count)

    def masked(self, inputs: SamplerInputs, masks: TokenMasks, buffer: MaskBuffer) -> SamplerInputs:
        """The inputs with masks."""
        buffer.clear()
        return with_masks(inputs, masks, self._vocab_size, self.device, buffer)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size], R one of the static counts -> logits [R, vocab_size]."""
        logits: torch.Tensor = self._graphs.run(Phase.HEAD, hidden.shape[0], self.phases.head, (hidden,))
        return logits

    def choose(self, chooser: Chooser, count: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The best tokens of the first `rows` hidden states, and their logits. `count`: the static count."""

        def best(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return chooser.choose(hidden[:rows])

        hidden = self.phases.hidden[:count]
        tokens, logits = self._graphs.run(Phase.HEAD, count, best, (hidden,))
        return tokens, logits


class DynamicTail:
    """Implements `StepTail`. step: in place of all else, what gives the best tokens and their logits."""

    def __init__(
        self,
        tails: DynamicTails,
        prompts: PromptRequests | None,
        sampling: tuple[Staged, SamplerInputs] | None,
        *,
        rows: int = 0,
        dummy_rows: int = 0,
        step: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> None:
        self._tails = tails
        self._prompts = prompts
        self._sampling = sampling
        self._rows = rows
        self._dummy_rows = dummy_rows
        self._step = step
        self._harmless: torch.Tensor | None = None
        self._scores: torch.Tensor | None = None
        self._samples: torch.Tensor | None = None
        self._best: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def decoding(self) -> Forward | None:
        return None if self._step is None else self._decode_best

    def _decode_best(self, _staged: torch.Tensor) -> None:
        if self._step is not None:
            self._tails.phases.gate.forward_begins()
            self._best = self._step()

    def after_prefill(self, result: Any) -> None:
        hidden, self._harmless = result
        if self._prompts is not None:
            self._scores = self._score(hidden, self._prompts)

    def restrict(self, masks: TokenMasks, buffer: MaskBuffer) -> None:
        if self._sampling is None:
            raise ValueError("masks for a step that samples nothing")
        staged, inputs = self._sampling
        self._sampling = staged, self._tails.masked(inputs, masks, buffer)

    def sample(self) -> None:
        tails = self._tails
        if self._sampling is None:
            if self._dummy_rows:
                tails.head(tails.phases.hidden[: self._dummy_rows])
            return
        staged, inputs = self._sampling
        (last_rows,) = staged.tensors()
        if (chooser := tails.phases.chooser) is not None and inputs.greedy:
            self._best = tails.choose(chooser, last_rows.shape[0], self._rows)
            tails.phases.keep_tokens(last_rows[: self._rows], self._best[0])
            return
        logits = tails.head(tails.phases.hidden[: last_rows.shape[0]])
        few = _FEW_DRAWN if inputs.plain is not None or inputs.filtered is not None else _FEW
        with tails.device.stream.small_work() if logits.numel() <= few else nullcontext():
            batch = sample(logits, inputs, tails.phases.last_tokens, tails.device)
            tails.phases.keep_tokens(last_rows, batch.tokens)
        self._samples = batch.packed

    def copy(self) -> PackedCopy:
        return PackedCopy(self._tails.device, (self._harmless, self._scores, self._samples), self._best)

    def _score(self, hidden: torch.Tensor, requests: PromptRequests) -> torch.Tensor:
        """Packed scores of prompt tokens, slice by slice: the logits of a whole chunk would be large."""
        parts: list[torch.Tensor] = []
        for start in range(0, requests.picks.shape[0], requests.rows):
            picks = requests.picks[start : start + requests.rows]
            targets = requests.targets[start : start + requests.rows]
            logits = self._tails.head(hidden.index_select(0, picks))
            parts.append(prompt_logprobs(logits, targets, requests.alternatives, self._tails.device))
        return torch.cat(parts)


class PackedCopy:
    """Several tensors on their way to the host as one, in the widest float: ids below 2**24 stay exact.

    best: is on the host already, where all devices compute that choose.
    """

    def __init__(
        self,
        device: Device,
        parts: Sequence[torch.Tensor | None],
        best: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self._shapes = [None if part is None else part.shape for part in parts]
        self._copy: HostCopy | None = None
        if flat := [part.flatten().to(device.capabilities.wide_dtype) for part in parts if part is not None]:
            self._copy = device.stream.begin_to_host(torch.cat(flat) if len(flat) > 1 else flat[0])
        self._best = best

    def wait(self) -> StepParts:
        """The tensors on the host, once they are there, in their shapes."""
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
