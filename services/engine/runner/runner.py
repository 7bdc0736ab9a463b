"""Executes step plans: forwards in their buckets' static shapes, then one sampling pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.engine.bucketing import Bucket
from services.engine.device import Device
from services.engine.graphs import Graphs, Key, Phase
from services.engine.model.paged import PagedModel
from services.engine.runner.batches import (
    KvLayout,
    begun_by_decode,
    begun_by_prefill,
    decode_tensors,
    prefill_tensors,
)
from services.engine.sampling import RowParams, SampledToken, sample
from services.engine.scheduler import Sequence, StepPlan


@dataclass(frozen=True, slots=True)
class StepResult:
    """One entry for each sequence of `StepPlan.sampling()`, in its order."""

    sampled: tuple[tuple[Sequence, SampledToken], ...]


class PlanError(Exception):
    """A defect: a plan that does not fit its bucket."""


class Runner:
    """Owns the model and its KV on one device. Sequences and blocks are the scheduler's."""

    def __init__(self, model: PagedModel, device: Device, layout: KvLayout, graphs: Graphs) -> None:
        self._model = model
        self._device = device
        self._layout = layout
        self._graphs = graphs
        model.allocate_kv(layout.num_blocks, layout.block_size)
        self._prefill = self._prefill_logits
        self._decode = self._decode_logits

    def dummy(self, phase: Phase, key: Key) -> None:
        """Runs one forward on padding alone, for profiling and warm-up."""
        if not isinstance(key, Bucket):
            raise PlanError(f"{key} rows are no bucket")
        if phase is Phase.PREFILL:
            self._run_prefill(StepPlan((), (), (), key, None))
        else:
            self._run_decode(StepPlan((), (), (), None, key))

    def execute(self, plan: StepPlan) -> StepResult:
        """Computes one step. KV of all planned tokens is written when it returns."""
        rows = _row_params(plan)
        parts: list[torch.Tensor] = []
        if plan.bucket_prefill is not None:
            count = sum(chunk.samples for chunk in plan.prefills)
            parts.append(self._run_prefill(plan)[:count])
        if plan.bucket_decode is not None:
            parts.append(self._run_decode(plan)[: len(plan.decodes)])
        if not rows:
            return StepResult(())
        logits = torch.cat(parts) if len(parts) > 1 else parts[0]
        tokens = sample(logits, rows, self._device)
        return StepResult(tuple(zip(plan.sampling(), tokens, strict=True)))

    def _run_prefill(self, plan: StepPlan) -> torch.Tensor:
        bucket = plan.bucket_prefill
        longest = max((chunk.length for chunk in plan.prefills), default=1)
        context = max((-(-chunk.start // self._layout.block_size) for chunk in plan.prefills), default=0)
        if bucket is None or not bucket.covers(len(plan.prefills), longest, context):
            raise PlanError(f"prefill bucket {bucket} does not hold the step")
        bucket = self._graphs.choose(Phase.PREFILL, bucket)
        self._clear([*begun_by_prefill(plan.prefills, self._layout), self._layout.padding_block])
        tensors = prefill_tensors(plan.prefills, bucket, self._layout, self._device)
        logits: torch.Tensor = self._graphs.run(Phase.PREFILL, bucket, self._prefill, tensors)
        return logits

    def _run_decode(self, plan: StepPlan) -> torch.Tensor:
        bucket = plan.bucket_decode
        blocks = sum(row.position // self._layout.block_size + 1 for row in plan.decodes)
        if bucket is None or not bucket.covers(len(plan.decodes), 1, blocks):
            raise PlanError(f"decode bucket {bucket} does not hold the step")
        bucket = self._graphs.choose(Phase.DECODE, bucket)
        self._clear(begun_by_decode(plan.decodes, self._layout))
        tensors = decode_tensors(plan.decodes, bucket, self._layout, self._device)
        logits: torch.Tensor = self._graphs.run(Phase.DECODE, bucket, self._decode, tensors)
        return logits

    def _prefill_logits(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Logits of the tokens whose flat indexes are the last tensor, [R, vocab]."""
        tokens, positions, slots, context_blocks, context_lens, keep = tensors
        hidden = self._model.prefill(tokens, positions, slots, context_blocks, context_lens)
        return self._model.logits(hidden.index_select(0, keep))

    def _decode_logits(self, *tensors: torch.Tensor) -> torch.Tensor:
        tokens, positions, slots, blocks, rows, starts = tensors
        return self._model.logits(self._model.decode(tokens, positions, slots, blocks, rows, starts))

    def _clear(self, blocks: list[int]) -> None:
        """Zeroes blocks of which the coming forward reads slots that belong to nobody.

        A masked slot counts nothing only while it holds a number: 0 * NaN is NaN. So what the last owner left
        has to go, however it ended, when the next one begins a block; and the padding block before each
        prefill, whose context it fills up. A decode reads that block too, for rows that are dropped.
        """
        if blocks:
            ids = torch.tensor(blocks, dtype=torch.int64)
            self._model.clear_blocks(self._device.to_device(ids))


def _row_params(plan: StepPlan) -> list[RowParams]:
    """Parameters of the sampling rows, in the order of `StepPlan.sampling()`."""
    chunks = [(chunk.sequence, chunk.mask_stops) for chunk in plan.prefills if chunk.samples]
    decodes = [(row.sequence, row.mask_stops) for row in plan.decodes]
    return [
        RowParams(
            temperature=sequence.params.sampling.temperature,
            top_p=sequence.params.sampling.top_p,
            top_k=sequence.params.sampling.top_k,
            seed=sequence.params.sampling.seed,
            position=len(sequence.token_ids),
            masked_ids=sequence.params.stop_ids if mask_stops else frozenset(),
            top_logprobs=sequence.params.sampling.top_logprobs,
        )
        for sequence, mask_stops in (*chunks, *decodes)
    ]
