"""Sampling without an engine around it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from services.engine.device import Device
from services.engine.device.cpu import CpuDevice
from services.engine.domain import SamplingOptions
from services.engine.sampling import (
    Counts,
    ExactStages,
    MaskBuffer,
    Program,
    RowParams,
    SampledToken,
    SequenceState,
    TokenMasks,
    unpack,
)

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


def exact_program(rows: int, vocab: int, device: Device = CPU) -> Program:
    """The program of a device on which shapes cost nothing, for so many rows of logits."""
    return Program(device, vocab, Counts.powers((rows,), vocab), 1, 0)


def exact_stages(
    logits: torch.Tensor, last_tokens: Sequence[int] = (0,), device: Device = CPU
) -> ExactStages:
    """Computations on logits [R, V]: a hidden state is its own logits."""
    last = torch.tensor([*last_tokens, *[0] * (logits.shape[0] + 1)], dtype=torch.int64)
    return ExactStages(lambda hidden: hidden, logits, last, device)


def run(
    logits: torch.Tensor,
    rows: list[RowParams],
    *,
    last_tokens: Sequence[int] = (0,),
    device: Device = CPU,
    masks: TokenMasks | None = None,
) -> list[SampledToken]:
    """Samples logits [R, V], of which the first rows are the given ones."""
    stages = exact_stages(logits, last_tokens, device)
    program = exact_program(logits.shape[0], logits.shape[1], device)
    # Tokens are kept behind the given last ones.
    calls = program.sampling(rows, [len(last_tokens)] * len(rows), masked=masks is not None)
    masked = program.masks(masks, MaskBuffer(device)) if masks else ()
    for call in (*calls.scores, *masked, *calls.tokens):
        stages.run(call)
    results = unpack(stages.packed(), rows)
    if any(r.token_id not in (None, int(t)) for r, t in zip(results, stages.tokens, strict=False)):
        raise AssertionError("the packed tokens are not those on the device")
    return results


def adjusted(logits: torch.Tensor, rows: list[RowParams], last_tokens: Sequence[int] = (0,)) -> torch.Tensor:
    """The scores that the rows' tokens are drawn from, before temperature and filters."""
    stages = exact_stages(logits, last_tokens)
    calls = exact_program(*logits.shape).sampling(rows, [0] * len(rows))
    for call in calls.scores:
        stages.run(call)
    return stages.scores
