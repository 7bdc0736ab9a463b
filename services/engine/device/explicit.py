"""Attention of a prefill spelled out, for what a fused kernel does not know."""

from __future__ import annotations

import torch

from services.engine.device.features import AttentionFeatures

# Scores held at once, in elements: longer contexts are done in slices of queries.
_MAX_SCORES = 2**24


def explicit_prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    features: AttentionFeatures,
) -> torch.Tensor:
    """Implements `Device.attend_prefill` with plain operations of static shape; all sums are in float32."""
    batch, heads, count, _ = query.shape
    key, value = key.float(), value.float()
    if mask is None:
        mask = torch.ones((1, 1, count, count), dtype=torch.bool, device=query.device).tril()
    step = max(1, _MAX_SCORES // (batch * heads * key.shape[2]))
    parts = [
        _attend(
            query[:, :, first : first + step], key, value, mask[:, :, first : first + step], scale, features
        )
        for first in range(0, count, step)
    ]
    return torch.cat(parts, dim=2).to(query.dtype)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    features: AttentionFeatures,
) -> torch.Tensor:
    batch, heads, count, dim = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    # The query heads that share a key head lie one after the other.
    grouped = query.float().reshape(batch, kv_heads, heads // kv_heads * count, dim)
    scores = (grouped @ key.transpose(2, 3)).view(batch, heads, count, keys).mul_(scale)
    if features.softcap is not None:
        scores.div_(features.softcap).tanh_().mul_(features.softcap)
    if mask.dtype is torch.bool:
        scores.masked_fill_(~mask, float("-inf"))
    else:
        scores.add_(mask)
    if features.sinks is not None:
        sinks = features.sinks.float().view(1, heads, 1, 1).expand(batch, heads, count, 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1)[..., :keys]
    out = weights.reshape(batch, kv_heads, -1, keys) @ value
    return out.view(batch, heads, count, -1)
