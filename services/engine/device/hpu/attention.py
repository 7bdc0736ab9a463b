"""Attention on an HPU: FusedSDPA for a prefill, whole or in slices; flat and dense for a decode.

Source: docs/gaudi-facts.md 3.4. The kernel gives for each query its result, the largest score m and the
reciprocal of the sum of exponentials; two slices a and b merge with m = max(m_a, m_b) and
l_i = sum_i * exp(m_i - m) into (l_a * out_a + l_b * out_b) / (l_a + l_b).

Source: gaudi-facts.md 3.4 and 4.5. Without a mask the kernel knows which rows are padded and skips them; with
a mask it may know neither that nor causality.

Rows and their blocks are joined by products with a one-hot matrix, which the matrix engine does, in place of
gathers and scatters. Source: docs/gaudi-facts.md 3.3, with two differences. A sink counts once for a row, not
once for each of its blocks. And since 0 * NaN is NaN, what is not a number is taken out before a product and
put back into the row that it belongs to: a row's result does not depend on its neighbours.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.functional import pad

from services.engine.device.attention import HIDDEN, NO_FEATURES, AttentionFeatures, explicit_prefill
from services.engine.device.hpu.fused import FusedKernels
from services.engine.device.hpu.settings import AttentionSettings, Softmax

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
    """Attend: query [B, heads, Q, d]; key and value [B, kv_heads, K, d], K > Q; mask bool [B, 1, Q, K].

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
    """Return zero where the bool mask lets a query look, elsewhere far below any score.

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
    """Return the result, the largest scores and the sums of one slice, float32."""
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


def attend_prefill(
    kernels: FusedKernels,
    settings: AttentionSettings,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    features: AttentionFeatures = NO_FEATURES,
    lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """Implement `PrefillAttention`, given kernels and settings."""
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
    """Return the kernel's name of the softmax; other modes than its own take bfloat16 alone."""
    if dtype is not torch.bfloat16:
        return "None"
    return "fp32" if settings.softmax is Softmax.FP32 else "fast"


def _fusible(kernels: FusedKernels, mask: torch.Tensor | None, features: AttentionFeatures) -> bool:
    if kernels.sdpa is None or features.softcap is not None:
        return False
    if features.sinks is not None and not kernels.sdpa_sinks:
        return False
    # Biases of ALiBi grow beyond what bfloat16 can tell apart.
    return mask is None or mask.dtype is torch.bool


def _long(kernels: FusedKernels, settings: AttentionSettings, query: torch.Tensor, key: torch.Tensor) -> bool:
    if kernels.sliced_sdpa is None or not settings.slice_from:
        return False
    # Without context only the causal mask is needed, and the kernel is faster unsliced.
    return key.shape[2] > query.shape[2] and key.shape[2] >= settings.slice_from


def _whole(
    kernels: FusedKernels,
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


# Below any score that a model gives, and near enough to zero to be rounded without harm.
_LOWEST = -1e9

# Elements of an intermediate that the search for maxima without index_reduce may have.
_MAX_ELEMENTS = 2**25


def attend_decode(
    kernels: FusedKernels,
    softmax: Softmax,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    blocks: torch.Tensor,
    rows: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
    features: AttentionFeatures = NO_FEATURES,
) -> torch.Tensor:
    """Implement `DecodeAttention`, given kernels and the softmax.

    A softmax in float32 needs a product of queries and keys in float32: that of bfloat16 matrices is rounded
    to bfloat16 before the softmax sees it. For this the gathered keys, never the whole cache, are cast: five
    times their bytes are moved (2 read, 4 written, 4 read for each 2). Values are not: their weights lie
    between 0 and 1, where bfloat16 loses no more than it does of the result.
    """
    dtype = query.dtype
    if softmax is Softmax.FP32:
        query = query.float()
    batch, heads, _ = query.shape
    count, _, block_size = bias.shape
    kv_heads = key_cache.shape[1]
    # [J, B]: one where a block belongs to a row; padding belongs to none. Remade in each layer: it is a
    # thousandth of the bytes of the cache that a layer reads.
    owners = (rows.unsqueeze(1) == torch.arange(batch, device=rows.device)).to(query.dtype)
    usable = torch.isfinite(query)
    key = _fetch(key_cache, blocks, count, block_size).to(query.dtype)
    scores = _scores(query.masked_fill(~usable, 0.0), key, owners, scale)
    if features.softcap is not None:
        scores = torch.tanh(scores / features.softcap) * features.softcap
    value = _fetch(value_cache, blocks, count, block_size)
    adjusting = kernels.block_softmax_adjustment is not None and features.sinks is None
    if adjusting and kernels.block_softmax is not None and bias.shape[1] == 1:
        weights, share = _fused_softmax(kernels, scores, bias, rows, batch, kv_heads, dtype)
        total = None
    else:
        weights, highest, sums = local_softmax(scores + bias, dtype if adjusting else torch.float32)
        if adjusting:
            share, total = _fused_share(kernels, highest, sums, rows, batch, dtype), None
        else:
            share, total = row_share(kernels, highest, sums, rows, owners, features.sinks)
    weights = weights.view(count, kv_heads, heads // kv_heads, block_size)
    partial = torch.matmul(weights.to(value.dtype), value).view(count, heads, -1)
    out = _join(partial.float() * share.unsqueeze(-1), owners)
    if total is not None:
        # A padded row owns no block: its sum is zero.
        out = out / total.clamp_min(1e-30).unsqueeze(-1)
    return out.masked_fill(~usable.all(-1, keepdim=True), math.nan).to(dtype)


def _fetch(cache: torch.Tensor, blocks: torch.Tensor, count: int, block_size: int) -> torch.Tensor:
    """Gather [slots, kv_heads, d] -> [count, kv_heads, block_size, d]. Without ids it is a view."""
    paged = cache.view(-1, block_size, cache.shape[1], cache.shape[2])
    fetched = paged.index_select(0, blocks) if blocks.shape[0] else paged.narrow(0, 0, count)
    return fetched.transpose(1, 2)


def _scores(query: torch.Tensor, key: torch.Tensor, owners: torch.Tensor, scale: float) -> torch.Tensor:
    """Multiply query [B, heads, d], key [J, kv_heads, block_size, d] -> float32 [J, heads, block_size]."""
    batch, heads, dim = query.shape
    count, kv_heads = key.shape[:2]
    # As in `flat_decode`: a power of two loses nothing in half precision, the rest waits for float32.
    mantissa, exponent = math.frexp(scale)
    by_block = torch.matmul(owners, (query * 2.0**exponent).reshape(batch, heads * dim))
    grouped = by_block.view(count, kv_heads, heads // kv_heads, dim)
    return torch.matmul(grouped, key.transpose(2, 3)).float().view(count, heads, -1) * mantissa


def local_softmax(
    scores: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute block_softmax in torch's operations: exponentials of each block, their pivots and sums.

    scores [J, heads, block_size] float32, biases added. Returns exponentials like scores, pivots and sums
    float32 [J, heads]. A pivot is the block's maximum as `dtype` holds it, so that nothing is lost when
    it is handed on in that type.
    """
    highest = scores.amax(-1).clamp_min(_LOWEST).to(dtype).float()
    weights = torch.exp(scores - highest.unsqueeze(-1))
    return weights, highest, weights.sum(-1)


def row_share(
    kernels: FusedKernels,
    highest: torch.Tensor,
    sums: torch.Tensor,
    rows: torch.Tensor,
    owners: torch.Tensor,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factor from each block's pivot to its row's [J, heads], and row sums [B, heads]; float32.

    The reference of block_softmax_adjustment, which gives the one divided by the other. highest and sums
    [J, heads]; rows [J]; owners [J, B].
    """
    batch = owners.shape[1]
    pivot = _row_pivots(kernels, highest, rows, batch)
    if sinks is not None:
        pivot = torch.maximum(pivot, sinks.float())
    share = torch.exp(highest - pivot.index_select(0, rows))
    part = sums * share
    part = part.masked_fill(~torch.isfinite(part), 0.0)
    total = torch.matmul(owners.float().t(), part)
    if sinks is not None:
        total = total + torch.exp(sinks.float() - pivot[:batch])
    return share, total


def _row_pivots(kernels: FusedKernels, highest: torch.Tensor, rows: torch.Tensor, batch: int) -> torch.Tensor:
    """Return the largest pivot of each row's blocks, [B + 1, heads]; the last row is that of padding."""
    heads = highest.shape[1]
    if kernels.index_reduce:
        pivot = torch.full((batch + 1, heads), HIDDEN, dtype=torch.float32, device=highest.device)
        return pivot.index_reduce_(0, rows, highest, "amax")
    mine = (rows.unsqueeze(1) == torch.arange(batch + 1, device=rows.device)).unsqueeze(2)
    step = max(1, _MAX_ELEMENTS // mine.numel())
    parts = [
        highest[:, None, first : first + step].masked_fill(~mine, HIDDEN).amax(0)
        for first in range(0, heads, step)
    ]
    return torch.cat(parts, dim=1)


def _fused_share(
    kernels: FusedKernels,
    highest: torch.Tensor,
    sums: torch.Tensor,
    rows: torch.Tensor,
    batch: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Compute share over sum of `row_share` by the kernel, [J, heads]; exact in the model's type alone."""
    count, heads = highest.shape
    shape = [count, heads, 1, 1, 1]
    # Padding is one more row: how the kernel treats a row outside of the batch is not documented.
    share: torch.Tensor = kernels.block_softmax_adjustment(
        highest.to(dtype).view(shape), sums.to(dtype).view(shape), rows, batch + 1, shape
    )
    return share.view(count, heads).float()


def _fused_softmax(
    kernels: FusedKernels,
    scores: torch.Tensor,
    bias: torch.Tensor,
    rows: torch.Tensor,
    batch: int,
    kv_heads: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute exponentials [J, heads, block_size] and shares over sums [J, heads] by both kernels."""
    count, heads, block_size = scores.shape
    grouped = scores.to(dtype).view(count, kv_heads, heads // kv_heads, 1, block_size)
    weights, highest, sums = kernels.block_softmax(
        grouped, bias.to(dtype).view(count, 1, 1, 1, block_size), rows
    )
    share: torch.Tensor = kernels.block_softmax_adjustment(
        highest, sums, rows, batch + 1, [count, kv_heads, heads // kv_heads, 1, 1]
    )
    return weights.view(count, heads, block_size), share.reshape(count, heads).float()


def _join(parts: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
    """Sum the blocks of each row: parts float32 [J, heads, d], owners [J, B] -> float32 [B, heads, d]."""
    count, heads, dim = parts.shape
    finite = torch.isfinite(parts)
    clean = parts.masked_fill(~finite, 0.0).to(owners.dtype)
    joined = torch.matmul(owners.t(), clean.view(count, heads * dim)).float().view(-1, heads, dim)
    spoiled = torch.matmul(owners.t(), (1.0 - finite.float().amin(-1)).to(owners.dtype))
    return joined.masked_fill((spoiled > 0).unsqueeze(-1), math.nan)
