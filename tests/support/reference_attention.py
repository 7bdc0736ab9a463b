"""What the native attention must compute, in plain torch; and batches to compute it for."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from catenary_testing.native.attention import PagedCache, Span


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """A batch: query [rows, heads, head_dim], and where its sequences' keys and values lie."""

    query: torch.Tensor
    cache: PagedCache
    spans: tuple[Span, ...]


def attention_case(
    seed: int,
    dtype: torch.dtype,
    lengths: Sequence[tuple[int, int]],
    *,
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    layers: int = 1,
) -> AttentionCase:
    """Random queries, keys and values of spans of (tokens, context) each, in blocks that lie anyhow.

    Slots of no token hold what is no number.
    """
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-(tokens + context) // block_size) for tokens, context in lengths]
    blocks = list(range(sum(needed) + 1))
    random.Random(seed).shuffle(blocks)
    shape = (layers, len(blocks) * block_size, kv_heads, head_dim)
    key, value = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    spans: list[Span] = []
    used = torch.zeros(shape[1], dtype=torch.bool)
    first = 0
    for (tokens, context), count in zip(lengths, needed, strict=True):
        own = [blocks.pop() for _ in range(count)]
        spans.append(Span(first, tokens, context, own))
        used[slots_of(own, block_size, tokens + context)] = True
        first += tokens
    for tensor in (key, value):
        tensor[:, ~used] = math.nan
    query = torch.randn(first, kv_heads * group, head_dim, generator=generator)
    return AttentionCase(query, PagedCache(key, value, block_size), tuple(spans))


def slots_of(blocks: Sequence[int], block_size: int, count: int) -> torch.Tensor:
    """Slots of a sequence's first `count` positions."""
    position = torch.arange(count)
    return torch.tensor(blocks)[position // block_size] * block_size + position % block_size


def reference_attention(
    case: AttentionCase, *, scale: float, window: int = 0, softcap: float = 0.0, rounded: bool = False
) -> torch.Tensor:
    """float32 [layers, rows, heads, head_dim]: keys and values gathered by table, computed in float64.

    rounded: queries are rounded to the cache's dtype first, as kernels that multiply in it do.
    """
    cache = case.cache
    layers, _, kv_heads, _ = cache.key.shape
    query = case.query.to(cache.key.dtype) if rounded else case.query
    rows, heads, dim = query.shape
    out = torch.zeros(layers, rows, heads, dim)
    for span in case.spans:
        count = span.context + span.tokens
        slots = slots_of(span.blocks, cache.block_size, count)
        key, value = (
            tensor[:, slots].double().repeat_interleave(heads // kv_heads, dim=2)
            for tensor in (cache.key, cache.value)
        )
        mine = slice(span.first, span.first + span.tokens)
        scores = torch.einsum("qhd,lkhd->lhqk", query[mine].double(), key) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        position = torch.arange(count)
        own = position[span.context :, None]
        seen = position <= own
        if window:
            seen &= position > own - window
        weights = scores.masked_fill(~seen, -math.inf).softmax(dim=-1)
        out[:, mine] = torch.einsum("lhqk,lkhd->lqhd", weights, value).float()
    return out
