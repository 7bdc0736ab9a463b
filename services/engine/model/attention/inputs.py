"""What one forward tells every attention layer about the batch, and the masks that follow from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from services.engine.device import HIDDEN

Window = int | None
"""How many positions a layer looks back, the current one included; None: all of them."""


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """A prefill bucket of `batch` rows. slots [B * Q] where each token's KV goes; context_blocks [B, C] ids.

    masks: per window, bool [B, 1, Q, C * block_size + Q], or None where plain causal attention is meant.
    distances: float32 of the masks' shape, positions between query and key; only layers with ALiBi need it.
    lengths: int64 [B], how many of a row's tokens are its own; a device may then skip the others.
    """

    batch: int
    block_size: int
    slots: torch.Tensor
    context_blocks: torch.Tensor
    masks: Mapping[Window, torch.Tensor | None]
    distances: torch.Tensor | None = None
    lengths: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """A decode bucket. slots [B]; blocks [J] ids, or [0] for the first J; rows [J] their owners, B: none.

    biases: per window, float32 [J, block_size].
    distances: float32 [J, block_size], positions between query and key; only layers with ALiBi need it.
    """

    slots: torch.Tensor
    blocks: torch.Tensor
    rows: torch.Tensor
    biases: Mapping[Window, torch.Tensor]
    distances: torch.Tensor | None = None


def prefill_masks(
    windows: Iterable[Window], context_lens: torch.Tensor, query: int, context_tokens: int
) -> dict[Window, torch.Tensor | None]:
    """Masks of a prefill bucket. context_lens [B]: how many cached tokens precede each row's first query."""
    device = context_lens.device
    offsets = torch.arange(query, device=device)
    causal = offsets.unsqueeze(1) >= offsets.unsqueeze(0)
    cached = torch.arange(context_tokens, device=device)
    batch = context_lens.shape[0]
    # Context slots at and after the row's length belong to nobody.
    known = (cached.unsqueeze(0) < context_lens.unsqueeze(1)).view(batch, 1, 1, context_tokens)
    masks: dict[Window, torch.Tensor | None] = {}
    for window in windows:
        if window is None and context_tokens == 0:
            masks[None] = None
            continue
        current, past = causal, known.expand(batch, 1, query, context_tokens)
        if window is not None:
            current = causal & (offsets.unsqueeze(1) - offsets.unsqueeze(0) < window)
            positions = (context_lens.unsqueeze(1) + offsets).view(batch, 1, query, 1)
            past = past & (positions - cached < window)
        masks[window] = torch.cat((past, current.expand(batch, 1, query, query)), dim=-1)
    return masks


def decode_biases(
    windows: Iterable[Window],
    positions: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    block_size: int,
) -> dict[Window, torch.Tensor]:
    """Biases of a decode bucket. positions [B] of the new tokens; starts [J] those of the blocks' first."""
    owner, keys = _decode_positions(positions, rows, starts, block_size)
    biases: dict[Window, torch.Tensor] = {}
    for window in windows:
        seen = keys <= owner
        if window is not None:
            seen = seen & (owner - keys < window)
        biases[window] = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, HIDDEN)
    return biases


def prefill_distances(context_lens: torch.Tensor, query: int, context_tokens: int) -> torch.Tensor:
    """How far each key lies behind each query of a prefill bucket: float32 [B, 1, Q, context_tokens + Q]."""
    device = context_lens.device
    offsets = torch.arange(query, device=device)
    positions = context_lens.unsqueeze(1) + offsets
    cached = torch.arange(context_tokens, device=device).expand(context_lens.shape[0], context_tokens)
    keys = torch.cat((cached, positions), dim=1)
    return (positions.unsqueeze(2) - keys.unsqueeze(1)).unsqueeze(1).float()


def decode_distances(
    positions: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, block_size: int
) -> torch.Tensor:
    """How far each key lies behind its row's new token in a decode bucket: float32 [J, block_size]."""
    owner, keys = _decode_positions(positions, rows, starts, block_size)
    return (owner - keys).float()


def _decode_positions(
    positions: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new token's position [J, 1] and the keys' [J, block_size], for each block."""
    # Padding has row B: any position will do, since its result is dropped.
    owner = positions.index_select(0, rows.clamp_max(positions.shape[0] - 1)).unsqueeze(1)
    return owner, starts.unsqueeze(1) + torch.arange(block_size, device=starts.device)
