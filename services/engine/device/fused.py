"""Attention of a prefill through torch's fused kernel."""

from __future__ import annotations

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from services.engine.device.explicit import explicit_prefill
from services.engine.device.features import AttentionFeatures


def fused_prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    features: AttentionFeatures,
    *,
    groups_masked: bool,
) -> torch.Tensor:
    """Implements `Device.attend_prefill`.

    groups_masked: whether the device's kernel that takes masks knows grouped heads. Else keys and values are
    repeated for it, since what torch uses in its place keeps all scores.
    """
    special = features.softcap is not None or features.sinks is not None
    if special or (mask is not None and mask.dtype is not torch.bool):
        return explicit_prefill(query, key, value, mask, scale, features)
    # The kernel wants values as wide as keys.
    dim, missing = value.shape[-1], key.shape[-1] - value.shape[-1]
    value = pad(value, (0, missing)) if missing else value
    grouped = mask is None or groups_masked
    if not grouped:
        repeat = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(repeat, dim=1) for tensor in (key, value))
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return out[..., :dim]
