"""Tensors as the native decoder's C interface takes them."""

from __future__ import annotations

from typing import Any

import torch

from services.engine.device.cpu.structures import DecodeArguments, PrefillArguments


def decode_arguments(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    blocks: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
) -> tuple[DecodeArguments, list[torch.Tensor]]:
    """Arguments of a decode, and the tensors that they point into, which must live until the call returns."""
    count, entries = tokens.shape[0], rows.shape[0]
    arguments = DecodeArguments(count, entries)
    listed = {"blocks": (blocks, entries)} if blocks.shape[0] else {}
    held = point_to(
        arguments,
        tokens=(tokens, count),
        positions=(positions, count),
        slots=(slots, count),
        owners=(rows, entries),
        starts=(starts, entries),
        **listed,
    )
    return arguments, held


def prefill_arguments(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    context_blocks: torch.Tensor,
    context_lens: torch.Tensor,
) -> tuple[PrefillArguments, list[torch.Tensor]]:
    """Those of a prefill, likewise."""
    batch, context = context_blocks.shape
    count = tokens.shape[0]
    arguments = PrefillArguments(batch, count // batch, context)
    held = point_to(
        arguments,
        tokens=(tokens, count),
        positions=(positions, count),
        slots=(slots, count),
        context_blocks=(context_blocks, batch * context),
        context_lens=(context_lens, batch),
    )
    return arguments, held


def point_to(arguments: Any, **tensors: tuple[torch.Tensor, int]) -> list[torch.Tensor]:
    """Sets addresses of int64 tensors of so many numbers; gives what has to live until the call is over."""
    held = []
    for name, (tensor, count) in tensors.items():
        whole = whole_numbers(name, tensor, count)
        setattr(arguments, name, whole.data_ptr())
        held.append(whole)
    return held


def whole_numbers(name: str, tensor: torch.Tensor, count: int) -> torch.Tensor:
    """The tensor as the library reads it. Raises ValueError if it does not have so many numbers of int64."""
    if tensor.dtype is not torch.int64 or tensor.numel() != count:
        raise ValueError(f"{name} has {tensor.numel()} numbers of {tensor.dtype}, not {count} of int64")
    return tensor.contiguous()
