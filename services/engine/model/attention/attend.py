"""One layer's attention over paged KV: write the new tokens by slot, then attend over the cache."""

from __future__ import annotations

import torch

from services.engine.device import HIDDEN, NO_FEATURES, AttentionFeatures
from services.engine.model.attention.inputs import DecodeInputs, PrefillInputs, Window
from services.engine.model.attention.layers import LayerCache


def attend(
    layer: LayerCache,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    inputs: PrefillInputs | DecodeInputs,
    *,
    window: Window,
    scale: float,
    features: AttentionFeatures = NO_FEATURES,
) -> torch.Tensor:
    """query [T, heads, d], key [T, kv_heads, d], value [T, kv_heads, dv] -> [T, heads, dv].

    T is the rows times tokens per row of the bucket. dv may be less than d. `window` is one of those that
    the inputs' masks were made for. Key and value are written into the layer's cache.
    """
    if isinstance(inputs, PrefillInputs):
        return _prefill(layer, query, key, value, inputs, window, scale, features)
    _write(layer, key, value, inputs.slots)
    bias = inputs.biases[window].unsqueeze(1)
    if features.alibi is not None:
        bias = bias - _required(inputs.distances).unsqueeze(1) * features.alibi.float().unsqueeze(1)
    return layer.device.attend_decode(
        query, layer.key, layer.value, inputs.blocks, inputs.rows, bias, scale, features
    )


def _prefill(
    layer: LayerCache,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    inputs: PrefillInputs,
    window: Window,
    scale: float,
    features: AttentionFeatures,
) -> torch.Tensor:
    written_key, written_value = key, value
    query, key, value = (_split_rows(tensor, inputs.batch) for tensor in (query, key, value))
    if inputs.context_blocks.shape[1]:
        key = torch.cat((_context(layer.key, inputs), key), dim=2)
        value = torch.cat((_context(layer.value, inputs), value), dim=2)
    # After the context was read: padding tokens of a row that went wrong write NaN into the padding block,
    # which is part of its neighbours' context.
    _write(layer, written_key, written_value, inputs.slots)
    mask = inputs.masks[window]
    if features.alibi is not None:
        mask = _alibi_bias(mask, _required(inputs.distances), features.alibi)
    out = layer.device.attend_prefill(query, key, value, mask, scale, features, inputs.lengths)
    return out.transpose(1, 2).reshape(-1, out.shape[1], out.shape[3])


def _write(layer: LayerCache, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    layer.key.index_copy_(0, slots, key)
    layer.value.index_copy_(0, slots, value)


def _split_rows(tensor: torch.Tensor, batch: int) -> torch.Tensor:
    """[B * Q, heads, d] -> [B, heads, Q, d]."""
    tokens, heads, dim = tensor.shape
    return tensor.reshape(batch, tokens // batch, heads, dim).transpose(1, 2)


def _context(cache: torch.Tensor, inputs: PrefillInputs) -> torch.Tensor:
    """Cached tokens of each row by block id, never by range: [B, kv_heads, C * block_size, d]."""
    kv_heads, dim = cache.shape[1], cache.shape[2]
    paged = cache.view(-1, inputs.block_size, kv_heads, dim)
    gathered = paged.index_select(0, inputs.context_blocks.flatten())
    return gathered.view(inputs.batch, -1, kv_heads, dim).transpose(1, 2)


def _alibi_bias(mask: torch.Tensor | None, distances: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    """mask bool or None, distances [B, 1, Q, K], slopes [heads] -> float32 [B, heads, Q, K]."""
    # Without context the keys are the queries: those at a negative distance are still to come.
    visible = distances >= 0 if mask is None else mask
    bias = -distances * slopes.float().view(1, -1, 1, 1)
    return bias.masked_fill_(~visible, HIDDEN)


def _required(distances: torch.Tensor | None) -> torch.Tensor:
    if distances is None:
        raise ValueError("attention with ALiBi needs the distances between queries and keys")
    return distances
