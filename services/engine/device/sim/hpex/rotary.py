"""`apply_rotary_pos_emb` (gaudi-facts.md 4.5)."""

from __future__ import annotations

from enum import Enum

import torch


class RotaryPosEmbeddingMode(Enum):
    """Which elements of a head turn together: its halves (neox) or its neighbours (GPT-J)."""

    BLOCKWISE = 0
    PAIRWISE = 1


def apply_rotary_pos_emb(
    p: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    offset: int = 0,
    mode: RotaryPosEmbeddingMode = RotaryPosEmbeddingMode.BLOCKWISE,
) -> torch.Tensor:
    """Turn the heads of p by cos and sin, which cover a head's full dimension and broadcast to p.

    If one of the three is float32, all are cast to it and so is the result; otherwise cos and sin to p's
    dtype. The bridge takes a combined `rope_cache` too; the simulator does not.
    """
    wide = torch.float32 in (p.dtype, cos.dtype, sin.dtype)
    dtype = torch.float32 if wide else p.dtype
    p, cos, sin = p.to(dtype), cos.to(dtype), sin.to(dtype)
    turned: torch.Tensor = torch.ops.hpu.rotary_pos_embedding(p, sin, cos, position_ids, offset, mode.value)
    return turned
