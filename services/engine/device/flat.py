"""Flat paged attention: the work of a decode follows the batch's cached blocks, not its longest sequence."""

from __future__ import annotations

import math
import warnings

import torch

from services.engine.device.features import NO_FEATURES, AttentionFeatures

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
    """Implements `Device.attend_decode` with plain tensor operations of static shape.

    Scores are computed per block, then joined per row: the pivot of the softmax is the row's own maximum, so
    a row's result owes nothing to its neighbours. Sums are kept in float32.
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
