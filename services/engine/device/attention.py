"""Attention in torch's operations: fused or explicit for a prefill, flat over cached blocks for a decode."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import pad, scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class AttentionFeatures:
    """Extras of one layer's attention.

    softcap: scores become `softcap * tanh(scores / softcap)` before any mask or bias (Gemma 2).
    sinks [heads]: one more logit for each head, which takes part in the softmax and adds no value (gpt-oss).
    alibi [heads]: slopes; a score falls by the slope for each position between query and key. The caller of
    a kernel has added it to the mask or bias.
    """

    softcap: float | None = None
    sinks: torch.Tensor | None = None
    alibi: torch.Tensor | None = None


NO_FEATURES = AttentionFeatures()


class PrefillAttention(Protocol):
    """Attention of a prefill bucket."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
        features: AttentionFeatures = NO_FEATURES,
        lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend: query [B, heads, Q, d], key [B, kv_heads, K, d], value [B, kv_heads, K, dv], dv <= d.

        mask: bool [B, 1, Q, K], True where a query may look; or float32 [B, heads, Q, K] to be added to the
        scores; or None for plain causal with K = Q. lengths: int64 [B], how many of a row's first queries are
        its own, where the caller knows; results of the others are undefined. Returns [B, heads, Q, dv].
        """


class DecodeAttention(Protocol):
    """Attention of a decode bucket of B rows over J cached blocks."""

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        blocks: torch.Tensor,
        rows: torch.Tensor,
        bias: torch.Tensor,
        scale: float,
        features: AttentionFeatures = NO_FEATURES,
    ) -> torch.Tensor:
        """Attend: query [B, heads, d], caches [slots, kv_heads, d | dv] -> [B, heads, dv].

        blocks [J] ids, or [0] for the caches' first J blocks as one slice; rows [J] the row that owns each
        block, B for padding; bias float32 [J, 1 | heads, block_size] to be added to the scores, hugely
        negative where a row may not look.
        """


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
    """Implement `PrefillAttention` in plain operations of static shape; all sums are in float32."""
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


# torch calls index_reduce_ a beta; once per process it says so.
warnings.filterwarnings("ignore", message=r"index_reduce\(\) is in beta")

# Far below any score, yet finite: a row of padding stays a number, and differences of two of them too.
HIDDEN = -1e30


def flat_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    blocks: torch.Tensor,
    rows: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
    features: AttentionFeatures = NO_FEATURES,
) -> torch.Tensor:
    """Implement `DecodeAttention` in plain operations of static shape.

    Scores are computed per block, then joined per row: the pivot of the softmax is the row's own maximum, so
    a row's result does not depend on its neighbours. Sums are kept in float32.
    """
    batch, heads, _ = query.shape
    count, _, block_size = bias.shape
    kv_heads = key_cache.shape[1]
    repeat = heads // kv_heads
    owner = rows.clamp_max(batch - 1)
    key = _fetch(key_cache, blocks, count, block_size)
    # A power of two loses nothing in half precision and keeps float16 from overflowing; the rest of the scale
    # waits for float32. The product still rounds the scores, as transformers' eager attention does. A float32
    # product needs another copy of all keys: measured with 8 rows of SmolLM2 in bfloat16 on a CPU, a decode
    # then takes a tenth more at 256 tokens of context and at least a quarter more at 2048.
    mantissa, exponent = math.frexp(scale)
    grouped = (query * 2.0**exponent).index_select(0, owner).view(count * kv_heads, repeat, -1)
    scores = torch.bmm(grouped, key.transpose(1, 2)).float().view(count, heads, block_size)
    scores.mul_(mantissa)
    if features.softcap is not None:
        scores.div_(features.softcap).tanh_().mul_(features.softcap)
    scores.add_(bias)

    # Row `batch` collects the padding and is dropped.
    pivot = torch.full((batch + 1, heads), HIDDEN, dtype=torch.float32, device=query.device)
    if features.sinks is not None:
        pivot.copy_(features.sinks)
    pivot.index_reduce_(0, rows, scores.amax(-1), "amax")
    scores -= pivot.index_select(0, rows).unsqueeze(-1)
    weights = scores.exp_()
    total = torch.zeros((batch + 1, heads), dtype=torch.float32, device=query.device)
    if features.sinks is not None:
        total.copy_(features.sinks).sub_(pivot).exp_()
    total.index_add_(0, rows, weights.sum(-1))

    value = _fetch(value_cache, blocks, count, block_size)
    weights = weights.to(value.dtype).view(count * kv_heads, repeat, block_size)
    partial = torch.bmm(weights, value).view(count, heads, -1).float()
    out = torch.zeros((batch + 1, heads, partial.shape[-1]), dtype=torch.float32, device=query.device)
    out.index_add_(0, rows, partial)
    # A padded row owns no block: its sum is zero.
    out /= total.clamp_min(1e-30).unsqueeze(-1)
    return out[:batch].to(query.dtype)


def _fetch(cache: torch.Tensor, blocks: torch.Tensor, count: int, block_size: int) -> torch.Tensor:
    """[slots, kv_heads, d] -> [count * kv_heads, block_size, d], in one copy."""
    kv_heads, dim = cache.shape[1], cache.shape[2]
    paged = cache.view(-1, block_size, kv_heads, dim).transpose(1, 2)
    fetched = paged.index_select(0, blocks) if blocks.shape[0] else paged[:count]
    return fetched.reshape(-1, block_size, dim)


def fused_prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    features: AttentionFeatures = NO_FEATURES,
    lengths: torch.Tensor | None = None,
    *,
    groups_masked: bool,
) -> torch.Tensor:
    """Implement `PrefillAttention` with torch's fused kernel; `lengths` are not needed.

    groups_masked: whether the device's kernel for masks takes grouped heads. Else keys and values are
    repeated, since torch's replacement of such a kernel keeps all scores.
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
