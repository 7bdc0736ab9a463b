"""The tail of a step where each new shape costs a compilation: all of it is listed computations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.engine.device import Device, Forward, HostCopy
from services.engine.graphs import Graphs, Phase
from services.engine.model.paged import PagedModel
from services.engine.runner.execution import Phases
from services.engine.runner.tail import StepParts, TailRequest, scored_places, slice_rows
from services.engine.sampling import (
    Call,
    Counts,
    MaskBuffer,
    Program,
    SamplingCalls,
    StaticBuffers,
    StaticSizes,
    StaticStages,
    TokenMasks,
    allocate,
)


class StaticTails:
    """Implements `Tails` with shapes that are all known beforehand.

    prefill_rows, prefill_tokens: the most that a prefill bucket holds.
    """

    def __init__(
        self,
        model: PagedModel,
        phases: Phases,
        device: Device,
        graphs: Graphs,
        row_counts: tuple[int, ...],
        *,
        prefill_rows: int,
        prefill_tokens: int,
        beams: bool,
    ) -> None:
        rows = slice_rows(row_counts)
        sizes = StaticSizes(row_counts[-1], prefill_rows, prefill_tokens, rows)
        self.device = device
        self.buffers = allocate(device, sizes, model.vocab_size, model.hidden_size, model.dtype)
        self._graphs = graphs
        self._prefill = phases.prefill_static(self.buffers)
        places = self.buffers.prompts[0].shape[0] - 1
        counts = Counts.static(row_counts, model.vocab_size)
        self._program = Program(device, model.vocab_size, counts, rows, places, beams=beams)
        self._stages = StaticStages(phases.head, phases.hidden, phases.last_tokens, self.buffers, device)

    @property
    def counts(self) -> Mapping[Phase, tuple[int, ...]]:
        return self._program.counts

    @property
    def prefill(self) -> Forward:
        return self._prefill

    @property
    def prefill_sampled(self) -> Forward:
        return self._prefill

    @property
    def bytes(self) -> int:
        return self.buffers.bytes

    def prepare(self, request: TailRequest) -> StaticTail:
        turn = 1 + request.turn
        scores: list[Call] = []
        places = scored_places(request.prefills, request.query)
        if places is not None:
            scores = self._program.scores(*places, turn)
        sampling = SamplingCalls()
        if request.sampled:
            sampling = self._program.sampling(request.sampled, request.last_rows, masked=request.masked)
        result = self._program.result(turn, self.buffers.harmless)
        return StaticTail(self, scores, sampling, result, has_prefill=bool(request.prefills))

    def dummy(self, phase: Phase, count: int) -> StaticTail:
        if phase in (Phase.SCORE, Phase.RESULT):
            # What an earlier step reports may be on its way to the host still.
            self.device.stream.synchronize()
        call = self._program.dummy(phase, count, self.buffers.harmless)
        return StaticTail(self, [], SamplingCalls(tokens=[call]))

    def masks(self, masks: TokenMasks, buffer: MaskBuffer) -> list[Call]:
        """The computations that apply masks."""
        buffer.clear()
        return self._program.masks(masks, buffer)

    def run(self, calls: Sequence[Call]) -> None:
        """Run computations in order."""
        for call in calls:
            tensors = [tensor for tensor in call.tensors if tensor is not None]
            self._graphs.run(call.phase, call.key, self._stages.forward(call), tensors)


class StaticTail:
    """Implements `StepTail`."""

    decoding = None

    def __init__(
        self,
        tails: StaticTails,
        scores: Sequence[Call],
        sampling: SamplingCalls,
        result: Call | None = None,
        *,
        has_prefill: bool = False,
    ) -> None:
        self._tails = tails
        self._scores = scores
        self._sampling = sampling
        self._masks: list[Call] = []
        self._result = result
        self._has_prefill = has_prefill

    def after_prefill(self, result: Any) -> None:
        self._tails.run(self._scores)

    def restrict(self, masks: TokenMasks, buffer: MaskBuffer) -> None:
        self._masks = self._tails.masks(masks, buffer)

    def sample(self) -> None:
        self._tails.run((*self._sampling.scores, *self._masks, *self._sampling.tokens))

    def copy(self) -> StaticCopy:
        tails, result = self._tails, self._result
        if result is None:
            raise ValueError("a dummy has nothing to tell")
        tails.run([result])
        turn, buffers = result.key - 1, tails.buffers
        results = tails.device.stream.begin_to_host(buffers.results[turn])
        prompts = tails.device.stream.begin_to_host(buffers.prompts[turn]) if self._scores else None
        return StaticCopy(buffers, results, prompts, self._has_prefill, bool(self._sampling.tokens))


class StaticCopy:
    """All that a step has to tell on its way to the host, but for scores of prompt tokens in one copy."""

    def __init__(
        self,
        buffers: StaticBuffers,
        results: HostCopy,
        prompts: HostCopy | None,
        has_prefill: bool,
        has_samples: bool,
    ) -> None:
        self._buffers = buffers
        self._results = results
        self._prompts = prompts
        self._has_prefill = has_prefill
        self._has_samples = has_samples

    def wait(self) -> StepParts:
        """The parts, once they are there."""
        harmless, samples = self._buffers.unpack(self._results.wait())
        return StepParts(
            harmless if self._has_prefill else None,
            None if self._prompts is None else self._prompts.wait(),
            samples if self._has_samples else None,
        )
