"""The two kernels of flat paged attention's softmax (gaudi-facts.md 3.3 and 4.5)."""

from __future__ import annotations

import math

import torch

from services.engine.device.sim.fused.rules import NOISE, require

_VECTOR_BYTES = 256


def block_softmax(
    attn: torch.Tensor, block_bias: torch.Tensor, block_groups: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`torch.ops.hpu.block_softmax`: exponentials of each block's scores, their maxima and their sums.

    attn [J, kv_heads, heads per kv head, 1, block_size] (five dimensions, no other); bias broadcasts to it;
    groups [J], -1 for padding. Maxima and sums come flat, [J, rows rounded up to a vector of 256 bytes], as
    the bridge's output shapes say: only `block_softmax_adjustment` reads them. A padded block's scores are 0.
    """
    require(attn.dim() == 5, f"block_softmax: attn must be 5-dimensional, got {attn.dim()}")
    require(attn.dtype in (torch.float32, torch.bfloat16), f"block_softmax: no kernel for {attn.dtype}")
    require(block_bias.dtype is attn.dtype, "block_softmax: attn and block_bias must have one dtype")
    scores = attn.float() + block_bias.float()
    highest = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - highest)
    total = weights.sum(-1, keepdim=True)
    padded = (block_groups == -1).reshape(-1, 1, 1, 1, 1)
    weights = weights.masked_fill(padded, 0.0).to(attn.dtype)
    return weights, _flat(highest, padded, attn.dtype), _flat(total, padded, attn.dtype)


def _flat(values: torch.Tensor, padded: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    flat = values.masked_fill(padded, NOISE).flatten(1)
    vector = _VECTOR_BYTES // dtype.itemsize
    missing = -flat.shape[1] % vector
    return torch.nn.functional.pad(flat, (0, missing), value=NOISE).to(dtype)


def block_softmax_adjustment(
    block_maxes: torch.Tensor,
    block_sums: torch.Tensor,
    block_groups: torch.Tensor,
    batch_size: int,
    out_shape: list[int] | None = None,
) -> torch.Tensor:
    """`torch.ops.hpu.block_softmax_adjustment`: what each block's weights must be multiplied by.

    exp(own maximum - maximum of the group) / sum of the group, where a group is the blocks of one row of the
    batch. maxes and sums [J, kv_heads, heads per kv head, 1, 1], or as `block_softmax` gives them together
    with `out_shape`. A block of group -1 gets noise. One of a group beyond the batch is an error here: the
    kernel has no place for it, and what it does then is not told.
    """
    require(
        bool((block_groups < batch_size).all()),
        f"block_softmax_adjustment: a block belongs to no row of a batch of {batch_size}",
    )
    require(
        block_maxes.dtype is block_sums.dtype,
        "block_softmax_adjustment: block_maxes and block_sums must have one dtype",
    )
    require(
        out_shape is not None or block_maxes.dim() == 5,
        f"If no out_shape provided, block_maxes tensor must be 5-dimensional, got {block_maxes.dim()}",
    )
    shape = list(block_maxes.shape) if out_shape is None else list(out_shape)
    rows = math.prod(shape[1:])
    highest = block_maxes.float().flatten(1)[:, :rows]
    sums = block_sums.float().flatten(1)[:, :rows]
    adjusted = torch.full_like(highest, NOISE)
    for group in range(batch_size):
        own = block_groups == group
        if own.any():
            pivot = highest[own].amax(0)
            scaled = torch.exp(highest[own] - pivot)
            adjusted[own] = scaled / (sums[own] * scaled).sum(0)
    return adjusted.reshape(shape).to(block_maxes.dtype)
