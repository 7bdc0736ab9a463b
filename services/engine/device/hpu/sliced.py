"""Attention over a long context in slices, whose softmaxes are merged: no full mask, no full row of scores.

Source: docs/gaudi-facts.md 3.4. The kernel gives for each query its result, the largest score m and the
reciprocal of the sum of exponentials; two slices a and b merge with m = max(m_a, m_b) and
l_i = sum_i * exp(m_i - m) into (l_a * out_a + l_b * out_b) / (l_a + l_b).
"""

from __future__ import annotations

from typing import Any

import torch

from services.engine.device.flat import HIDDEN

_Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def sliced_prefill(
    kernel: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    mode: str,
    chunk: int,
) -> torch.Tensor:
    """query [B, heads, Q, d]; key and value [B, kv_heads, K, d], K > Q; mask bool [B, 1, Q, K].

    Slices have `chunk` queries and keys. Query i looks no further than key K - Q + i, so that slices of
    keys behind all of a slice's queries are left out. Returns [B, heads, Q, d].
    """
    heads, kv_heads = query.shape[1], key.shape[1]
    grouped = kv_heads not in (1, heads)
    if grouped:
        query = query.reshape(query.shape[0], kv_heads, heads // kv_heads, *query.shape[2:])
        key, value, mask = key.unsqueeze(2), value.unsqueeze(2), mask.unsqueeze(2)
    queries, context = query.shape[-2], key.shape[-2] - query.shape[-2]
    parts = []
    for first in range(0, queries, chunk):
        last = min(first + chunk, queries)
        merged: _Part | None = None
        for start in range(0, context + last, chunk):
            end = min(start + chunk, context + last)
            part = _slice(
                kernel,
                # The kernel reads whole rows one after the other.
                query[..., first:last, :].contiguous(),
                key[..., start:end, :].contiguous(),
                value[..., start:end, :].contiguous(),
                additive_mask(mask[..., first:last, start:end], query.dtype),
                scale,
                mode,
            )
            merged = part if merged is None else _merge(merged, part)
        if merged is not None:
            parts.append(merged[0].to(query.dtype))
    out = torch.cat(parts, dim=-2)
    return out.flatten(1, 2) if grouped else out


def additive_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Zero where the bool mask lets a query look, elsewhere far below any score.

    Finite, so that a query that sees nothing of a slice is still a number there.
    """
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, HIDDEN)


def _slice(
    kernel: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    mode: str,
) -> _Part:
    """The result, the largest scores and the sums of one slice, float32."""
    # Only as if for a gradient does the kernel give the statistics of its softmax.
    causal, statistics, dropout = False, True, 0.0
    found = kernel(query, key, value, mask, dropout, scale, causal, statistics, mode.lower(), None, "right")
    out, highest, reciprocal = (tensor.float() for tensor in found[:3])
    return out, highest, 1.0 / reciprocal


def _merge(left: _Part, right: _Part) -> _Part:
    highest = torch.maximum(left[1], right[1])
    first = left[2] * torch.exp(left[1] - highest)
    second = right[2] * torch.exp(right[1] - highest)
    total = first + second
    return left[0] * (first / total) + right[0] * (second / total), highest, total
