"""Sampling without an engine around it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from services.engine.device import CpuDevice, Device
from services.engine.domain import SamplingOptions
from services.engine.sampling import (
    MaskBuffer,
    RowParams,
    SampledToken,
    SequenceState,
    TokenMasks,
    prepare,
    sample,
    unpack,
    with_masks,
)
from services.engine.sampling.sampler import adjust

CPU = CpuDevice(1)


def without_float64() -> CpuDevice:
    """A CPU that adds up in float32, as an HPU has to."""
    device = CpuDevice(1)
    device.capabilities = replace(device.capabilities, wide_dtype=torch.float32)
    return device


def row(
    *,
    tokens: Sequence[int] = (),
    prompt_len: int = 0,
    position: int = 9,
    masked_ids: Collection[int] = (),
    pending_row: int | None = None,
    **options: Any,
) -> RowParams:
    """A row of a sequence with these known tokens; options as in SamplingOptions, seed 5 unless given."""
    chosen = SamplingOptions(**{"seed": 5, **options})
    state = SequenceState(chosen, list(tokens), prompt_len)
    return RowParams(state, position, masked_ids, pending_row)


def run(
    logits: torch.Tensor,
    rows: list[RowParams],
    *,
    last_tokens: Sequence[int] = (0,),
    device: Device = CPU,
    masks: TokenMasks | None = None,
) -> list[SampledToken]:
    """Samples logits [R, V], of which the first rows are the given ones."""
    inputs = prepare(rows, logits.shape[0], logits.shape[1], device)
    if masks is not None:
        inputs = with_masks(inputs, masks, logits.shape[1], device, MaskBuffer(device))
    batch = sample(logits, inputs, torch.tensor(last_tokens, dtype=torch.int64), device)
    results = unpack(batch.packed, rows)
    if any(r.token_id not in (None, int(t)) for r, t in zip(results, batch.tokens, strict=False)):
        raise AssertionError("the packed tokens are not those on the device")
    return results


def adjusted(logits: torch.Tensor, rows: list[RowParams], last_tokens: Sequence[int] = (0,)) -> torch.Tensor:
    """The scores that the rows' tokens are drawn from, before temperature and filters."""
    inputs = prepare(rows, logits.shape[0], logits.shape[1], CPU)
    return adjust(logits, inputs, torch.tensor(last_tokens, dtype=torch.int64))
