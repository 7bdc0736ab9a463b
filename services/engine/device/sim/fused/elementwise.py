"""The fused norm and the rotary embedding (gaudi-facts.md 4.5)."""

from __future__ import annotations

import torch

from services.engine.device.sim.fused.rules import require

BLOCKWISE = 0
PAIRWISE = 1


def rms_norm(data_in: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`torch.ops.hpu.rms_norm`: x / sqrt(mean(x^2) + eps) * gamma, and the reciprocal root [..., 1].

    x must have three dimensions. Both results are of x's dtype, or float32 if gamma's differs.
    """
    require(data_in.dim() == 3, f"rms_norm: the input must be 3-dimensional, got {data_in.dim()}")
    dtype = data_in.dtype if data_in.dtype is gamma.dtype else torch.float32
    values = data_in.float()
    reciprocal = torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
    return (values * reciprocal * gamma.float()).to(dtype), reciprocal.to(dtype)


def rotary_pos_embedding(
    input: torch.Tensor,
    sin: torch.Tensor,
    cos: torch.Tensor,
    position_ids: torch.Tensor | None,
    offset: int,
    mode: int,
) -> torch.Tensor:
    """`torch.ops.hpu.rotary_pos_embedding`: x * cos + rotated(x) * sin, in the dtype of x.

    BLOCKWISE turns the halves of the last dimension (neox), PAIRWISE its neighbours (GPT-J). cos and sin
    broadcast to x over its full last dimension; with `position_ids` [batch, length] (BLOCKWISE alone) they
    are tables [1, 1, positions, d] and x is [batch, heads, length, d].
    """
    require(offset == 0, f"rotary_pos_embedding: the simulator knows no offset, got {offset}")
    require(mode in (BLOCKWISE, PAIRWISE), f"rotary_pos_embedding: unknown mode {mode}")
    require(
        input.dtype is sin.dtype is cos.dtype, "rotary_pos_embedding: input, sin and cos must have one dtype"
    )
    if position_ids is not None:
        require(mode == BLOCKWISE, "rotary_pos_embedding: position_ids go with BLOCKWISE")
        cos, sin = (table.squeeze(1).squeeze(0)[position_ids].unsqueeze(1) for table in (cos, sin))
    require(
        cos.shape[-1] == sin.shape[-1] == input.shape[-1],
        f"rotary_pos_embedding: cos and sin must cover all {input.shape[-1]} of a head's dimension",
    )
    if mode == BLOCKWISE:
        first, second = input.chunk(2, -1)
        rotated = torch.cat((-second, first), -1)
    else:
        rotated = torch.stack((-input[..., 1::2], input[..., ::2]), -1).flatten(-2)
    return input * cos + rotated * sin
