"""Attention of a prefill through FusedSDPA, whole or in slices of a long context.

Source: gaudi-facts.md 3.4 and 4.5. Without a mask the kernel knows which rows are padded and skips them; with
a mask it may know neither that nor causality.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from services.engine.device.explicit import explicit_prefill
from services.engine.device.features import AttentionFeatures
from services.engine.device.hpu.probing import Kernels
from services.engine.device.hpu.settings import AttentionSettings, Softmax
from services.engine.device.hpu.sliced import additive_mask, sliced_prefill


def attend_prefill(
    kernels: Kernels,
    settings: AttentionSettings,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    features: AttentionFeatures,
    lengths: torch.Tensor | None,
) -> torch.Tensor:
    """Implements `Device.attend_prefill`."""
    if not _fusible(kernels, mask, features):
        return explicit_prefill(query, key, value, mask, scale, features)
    mode = softmax_mode(settings, query.dtype)
    # The kernel is tried with values as wide as keys alone.
    dim, missing = value.shape[-1], key.shape[-1] - value.shape[-1]
    wide = pad(value, (0, missing)) if missing else value
    if mask is not None and features.sinks is None and _long(kernels, settings, query, key):
        out = sliced_prefill(kernels.sliced_sdpa, query, key, wide, mask, scale, mode, settings.slice_chunk)
    else:
        additive = None if mask is None else additive_mask(mask, query.dtype)
        out = _whole(kernels, query, key, wide, additive, scale, mode, features.sinks, lengths)
    return out[..., :dim]


def softmax_mode(settings: AttentionSettings, dtype: torch.dtype) -> str:
    """The kernel's softmax; it knows bfloat16 alone in other modes than its own."""
    if dtype is not torch.bfloat16:
        return "None"
    return "fp32" if settings.softmax is Softmax.FP32 else "fast"


def _fusible(kernels: Kernels, mask: torch.Tensor | None, features: AttentionFeatures) -> bool:
    if kernels.sdpa is None or features.softcap is not None:
        return False
    if features.sinks is not None and not kernels.sdpa_sinks:
        return False
    # Biases of ALiBi grow beyond what bfloat16 can tell apart.
    return mask is None or mask.dtype is torch.bool


def _long(kernels: Kernels, settings: AttentionSettings, query: torch.Tensor, key: torch.Tensor) -> bool:
    if kernels.sliced_sdpa is None or not settings.slice_from:
        return False
    # Without context only the causal mask is needed, and the kernel is faster unsliced.
    return key.shape[2] > query.shape[2] and key.shape[2] >= settings.slice_from


def _whole(
    kernels: Kernels,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    mode: str,
    sinks: torch.Tensor | None,
    lengths: torch.Tensor | None,
) -> torch.Tensor:
    valid = None
    if mask is None and lengths is not None:
        # A padded row has no token; one keeps it from dividing nothing by nothing.
        valid = lengths.clamp_min(1).to(torch.int32)
    recompute, dropout = True, 0.0
    arguments: list[Any] = [
        query,
        key,
        value,
        mask,
        dropout,
        mask is None,
        scale,
        mode,
        recompute,
        valid,
        "right",
    ]
    if sinks is not None:
        # Neither a dropout mask nor probabilities back, and no window.
        arguments += [False, False, (-1, -1), sinks]
    out: torch.Tensor = kernels.sdpa.apply(*arguments)
    return out
