"""Execute step plans: forwards in their buckets' static shapes, then one sampling pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from services.engine.bucketing import Bucket
from services.engine.device import Device, Submitted, failed
from services.engine.graphs import Graphs, Key, Phase, PhaseWork
from services.engine.model.paged import PagedModel
from services.engine.runner.batches import (
    BatchBuilder,
    BlockTables,
    KvLayout,
    StepStaging,
    begun_by_decode,
    begun_by_prefill,
    padded_count,
    static_counts,
)
from services.engine.runner.copies import BlockCopies
from services.engine.runner.exact import ExactTails
from services.engine.runner.execution import Phases, StepExecutor, StepInputs
from services.engine.runner.static import StaticTails
from services.engine.runner.tail import (
    NoTail,
    PromptScores,
    StepCopy,
    TailRequest,
    Tails,
    read_scores,
    scored_tokens,
)
from services.engine.sampling import (
    MaskBuffer,
    RowParams,
    SampledToken,
    SequenceStates,
    TokenMasks,
    read_best,
    unpack,
)
from services.engine.scheduler import Sequence, StepPlan
from services.engine.tracing import StepTracer


def row_params(plan: StepPlan, states: SequenceStates) -> list[RowParams]:
    """Return the parameters of the sampling rows, in the order of `StepPlan.sampling()`."""

    rows: list[RowParams] = []
    for chunk in plan.prefills:
        if chunk.samples:
            # A prompt's tokens are all known; the newest of a decoding sequence may still be on the device.
            rows.append(_row(chunk.sequence, chunk.end, chunk.mask_stops, None, states))
    for one in plan.decodes:
        sequence = one.sequence
        pending_row = sequence.row if one.token is None else None
        rows.append(_row(sequence, one.position + 1, one.mask_stops, pending_row, states))
    return rows


def _row(
    sequence: Sequence, position: int, mask_stops: bool, pending_row: int | None, states: SequenceStates
) -> RowParams:
    params = sequence.params
    state = states.get(sequence.row, params.sampling, sequence.token_ids, sequence.prompt_len)
    masked = params.stop_ids if mask_stops and not sequence.constrained else ()
    return RowParams(state, position, masked, pending_row, sequence.group is not None)


class PlanError(Exception):
    """Defect: a plan that does not fit its buckets, or a step that comes too early."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of a step.

    sampled: one entry for each sequence of `StepPlan.sampling()`, in its order. broken: sequences of which a
    prefill wrote KV that is not a number; other results of the step for them are void. prompts: scores
    of prompt tokens, of those that asked.
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
        """Give the device the rest of the step. `masks` of its rows, None: nothing is masked after all.

        Errors are raised by `result`. Call it once, if `awaits_masks`, before another launch.
        """
        if self._rest is None:
            raise PlanError("the rest of a step is launched twice")
        self._work, self._rest = self._rest(masks), None

    def result(self) -> StepResult:
        """Wait for the step. Raises its error."""
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


class Runner:
    """Owns the model and its KV on one device, for up to `max_num_seqs` sequences at once.

    Sequences and blocks are the scheduler's. `beams`: some may be beams of a search. While the device
    computes one step the next may be launched.
    """

    def __init__(
        self,
        model: PagedModel,
        device: Device,
        layout: KvLayout,
        graphs: Graphs,
        *,
        max_num_seqs: int,
        max_block_moves: int = 1,
        prefill_buckets: Items[Bucket] = (),
        beams: bool = False,
        tracer: StepTracer | None = None,
    ) -> None:
        self._model = model
        self._device = device
        self._layout = layout
        self._graphs = graphs
        self._tracer = tracer or StepTracer()
        model.allocate_kv(layout.num_blocks, layout.block_size)
        self.copies = BlockCopies(model, device, graphs, layout)
        self.phases = Phases(model, device, layout, max_num_seqs)
        self._states = SequenceStates(max_num_seqs)
        self._builder = BatchBuilder(layout, BlockTables(max_num_seqs), self.phases.spare_row)
        self._tails = self._make_tails(static_counts(max_num_seqs), prefill_buckets, beams=beams)
        self.executor = StepExecutor(model, device, graphs, self.phases, self._tails, self._tracer)
        # One for the step that is computed, one for that which waits for it.
        self._staging = (StepStaging(device), StepStaging(device))
        self._launched: list[LaunchedStep | None] = [None, None]
        self.launches = 0
        # A running sequence begins one block in a step at most, and a prefill begins the padding block anew.
        self.clear_counts = static_counts(max_num_seqs + 1)
        # Where blocks are shared instead of moved, a sequence copies one at most, as it begins to run.
        self.move_counts = static_counts(max_block_moves if layout.contiguous else max_num_seqs)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Modules of the model, as far as torch computes it."""
        return self._model.modules

    def _make_tails(self, row_counts: tuple[int, ...], prefill: Items[Bucket], *, beams: bool) -> Tails:
        model, device, phases, graphs = self._model, self._device, self.phases, self._graphs
        if not device.capabilities.static_shapes:
            return ExactTails(phases, device, graphs, model.vocab_size, row_counts)
        if not prefill:
            raise ValueError("a device of static shapes has to know the prefill buckets beforehand")
        return StaticTails(
            model,
            phases,
            device,
            graphs,
            row_counts,
            prefill_rows=max(bucket.batch for bucket in prefill),
            prefill_tokens=max(bucket.batch * bucket.query for bucket in prefill),
            beams=beams,
        )

    @property
    def tail_counts(self) -> Mapping[Phase, tuple[int, ...]]:
        """Static shapes of the computations after the forwards, which `dummy` runs."""
        return self._tails.counts

    @property
    def tail_bytes(self) -> int:
        """Bytes of device memory that the tails hold."""
        return self._tails.bytes

    def dummy(self, phase: Phase, key: Key) -> None:
        """Run one computation of a step on padding alone and wait for it, for profiling and warm-up.

        `key` is a bucket, or one of the phase's `tail_counts`, or of `clear_counts` or `move_counts`, or
        `copies.blocks`. Raises the errors of the computation.
        """
        if phase in (Phase.READ, Phase.WRITE):
            self.copies.rehearse(phase).result()
            return
        # Made here, as a step's: a tensor made in inference mode is another kind to a compiler.
        inputs = self._dummy_inputs(phase, key)
        self._device.stream.submit(partial(self.executor.rehearse, inputs)).result()

    def _dummy_inputs(self, phase: Phase, key: Key) -> StepInputs:
        staging, padding = StepStaging(self._device), self._layout.padding_block
        if isinstance(key, int) and phase in self._tails.counts:
            return StepInputs(self._tails.dummy(phase, key))
        inputs = StepInputs(NoTail())
        if isinstance(key, Bucket):
            if phase is Phase.PREFILL:
                inputs.prefill = key, self._builder.prefill((), key, staging.prefill)
            else:
                inputs.decode = key, self._builder.decode((), key, 0, staging.decode)
        elif phase is Phase.CLEAR:
            inputs.clear = self._builder.ids([], padding, key, staging.clear)
        else:
            inputs.moves = self._builder.moves((), key, staging.moves)
        return inputs

    def launch(self, plan: StepPlan, *, masked: bool = False) -> LaunchedStep:
        """Prepare a step and give it to the device. Errors of either are raised by its result.

        `masked`: its forwards alone for now, and the rest with the masks of its constrained rows. Raises
        PlanError if two steps are in flight already.
        """
        turn = self.launches % 2
        earlier = self._launched[turn]
        if earlier is not None and not earlier.finished:
            raise PlanError("two steps are in flight: the inputs of the first would be overwritten")
        self.launches += 1
        launched = self._launch(plan, turn, masked)
        self._launched[turn] = launched
        return launched

    def _launch(self, plan: StepPlan, turn: int, masked: bool) -> LaunchedStep:
        number, rows, gate = self.launches, list[RowParams](), self.phases.gate
        gate.given(number)
        wait = partial(gate.wait, number)
        try:
            with self._tracer.span("prepare", number):
                inputs = self._prepare(plan, turn, masked)
            rows = inputs.sampled
            if masked:
                begun = self._device.stream.submit(partial(self.executor.begin, inputs, number))
                rest = partial(self._sample, inputs, number, begun, self._staging[turn].masks)
                return LaunchedStep(number, plan, rows, wait, rest=rest)
            work = self._device.stream.submit(partial(self.executor.run, inputs, number))
        except Exception as error:
            work = failed(error)
            gate.ended(number)
        return LaunchedStep(number, plan, rows, wait, work)

    def _sample(
        self,
        inputs: StepInputs,
        number: int,
        begun: Submitted[None],
        buffer: MaskBuffer,
        masks: TokenMasks | None,
    ) -> Submitted[StepCopy]:
        """Give the device the rest of a step of which it has the forwards."""
        try:
            if masks is not None:
                inputs.tail.restrict(masks, buffer)
            return self._device.stream.submit(partial(self.executor.end, inputs, number, begun))
        except Exception as error:
            self.phases.gate.ended(number)
            return failed(error)

    def _prepare(self, plan: StepPlan, turn: int, masked: bool) -> StepInputs:
        staging, sampled, query = self._staging[turn], row_params(plan, self._states), 0
        inputs = StepInputs(NoTail(), sampled=sampled)
        if plan.moves:
            count = padded_count(len(plan.moves), self.move_counts)
            inputs.moves = self._builder.moves(plan.moves, count, staging.moves)
        begun: list[int] = []
        if plan.prefills:
            bucket, inputs.work[Phase.PREFILL] = self._prefill_bucket(plan)
            begun += [*begun_by_prefill(plan.prefills, self._layout), self._layout.padding_block]
            inputs.prefill = bucket, self._builder.prefill(plan.prefills, bucket, staging.prefill)
            inputs.scores = any(map(scored_tokens, plan.prefills))
            query = bucket.query
        if plan.decodes:
            bucket, inputs.work[Phase.DECODE] = self._decode_bucket(plan)
            begun += begun_by_decode(plan.decodes, self._layout)
            first = len(sampled) - len(plan.decodes)
            inputs.decode = bucket, self._builder.decode(plan.decodes, bucket, first, staging.decode)
        if begun:
            count = padded_count(len(begun), self.clear_counts)
            inputs.clear = self._builder.ids(begun, self._layout.padding_block, count, staging.clear)
        last_rows = [sequence.row for sequence in plan.sampling()]
        decodes = None
        if inputs.decode is not None and not plan.prefills and not masked:
            decodes = inputs.decode[1]
        inputs.tail = self._tails.prepare(
            TailRequest(plan.prefills, query, sampled, last_rows, turn, masked, decodes)
        )
        return inputs

    def _prefill_bucket(self, plan: StepPlan) -> tuple[Bucket, PhaseWork]:
        longest = max(chunk.length for chunk in plan.prefills)
        contexts = [-(-chunk.start // self._layout.block_size) for chunk in plan.prefills]
        bucket = plan.bucket_prefill
        if bucket is None or not bucket.covers(len(plan.prefills), longest, max(contexts)):
            raise PlanError(f"prefill bucket {bucket} does not hold the step")
        bucket = self._graphs.choose(Phase.PREFILL, bucket)
        tokens = sum(chunk.length for chunk in plan.prefills)
        work = self._graphs.padding.add(Phase.PREFILL, bucket, tokens=tokens, blocks=sum(contexts))
        return bucket, work

    def _decode_bucket(self, plan: StepPlan) -> tuple[Bucket, PhaseWork]:
        blocks = sum(row.position // self._layout.block_size + 1 for row in plan.decodes)
        fetched = blocks
        if self._layout.contiguous:
            fetched = max(row.sequence.highest_block for row in plan.decodes) + 1
        bucket = plan.bucket_decode
        if bucket is None or not bucket.covers(len(plan.decodes), 1, fetched):
            raise PlanError(f"decode bucket {bucket} does not hold the step")
        bucket = self._graphs.choose(Phase.DECODE, bucket)
        work = self._graphs.padding.add(Phase.DECODE, bucket, tokens=len(plan.decodes), blocks=blocks)
        return bucket, work
