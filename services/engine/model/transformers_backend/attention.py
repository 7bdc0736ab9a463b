"""Our paged attention, registered as an attention implementation of transformers.

A model calls it once per layer with the new tokens' query, key and value. It writes key and value into the
layer's cache in place, by slot, and attends over the cache. What the batch looks like travels as the keyword
`paged`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from services.engine.device import Device
from services.engine.model.attention import DecodeInputs, LayerCache, LayerSpec, PrefillInputs, Window

IMPLEMENTATION = "catenary_paged"

_LAYER = "catenary_layer"
# Keywords that reach an attention function and ask nothing of it.
_NEUTRAL = frozenset(
    {
        "cache_position",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


class UnsupportedAttention(Exception):
    """A layer asks for attention that is not implemented here; serving it would give wrong tokens."""


@dataclass(slots=True)
class Probe:
    """Stands in for the inputs in the dummy forward at start: it learns what the layers are."""

    device: Device
    layers: dict[int, LayerSpec] = field(default_factory=dict)
    modules: dict[int, nn.Module] = field(default_factory=dict)

    def meet(self, module: nn.Module, key: torch.Tensor, value: torch.Tensor, window: Window) -> None:
        """Records one layer. Raises UnsupportedAttention if it has no index of its own."""
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or index in self.layers:
            raise UnsupportedAttention("a layer with more than one attention, or none of its own")
        self.layers[index] = LayerSpec(key.shape[1], key.shape[3], value.shape[3], window)
        self.modules[index] = module


def attach_cache(module: nn.Module, cache: LayerCache) -> None:
    """Gives a layer its cache: on the module, since an index into a list would be a constant of a graph."""
    setattr(module, _LAYER, cache)


def cache_of(module: nn.Module) -> LayerCache:
    """The cache that `attach_cache` gave the layer."""
    cache: LayerCache = getattr(module, _LAYER)
    return cache


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    paged: Probe | PrefillInputs | DecodeInputs | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, T, d], key and value [1, kv_heads, T, d | dv] -> [1, T, heads, dv].

    The batch is flattened: T is rows times tokens per row. Raises UnsupportedAttention for anything asked
    that is not done here, since an ignored option would give wrong tokens in silence.
    """
    _refuse_unknown(attention_mask, dropout, is_causal, others)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if isinstance(paged, Probe):
        paged.meet(module, key, value, sliding_window)
        return paged.device.attend_prefill(query, key, value, None, scale).transpose(1, 2), None
    layer = cache_of(module)
    if isinstance(paged, PrefillInputs):
        out = _prefill(layer, query, key, value, paged, sliding_window, scale)
    elif isinstance(paged, DecodeInputs):
        _write(layer, key, value, paged.slots)
        rows = query[0].transpose(0, 1)
        bias = paged.biases[sliding_window]
        out = layer.device.attend_decode(rows, layer.key, layer.value, paged.blocks, paged.rows, bias, scale)
    else:
        raise UnsupportedAttention("a forward without the engine's inputs")
    return out.unsqueeze(0), None


def _prefill(
    layer: LayerCache,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    inputs: PrefillInputs,
    window: Window,
    scale: float,
) -> torch.Tensor:
    """Returns [B * Q, heads, dv]."""
    written_key, written_value = key, value
    query, key, value = (_split_rows(tensor, inputs.batch) for tensor in (query, key, value))
    if inputs.context_blocks.shape[1]:
        key = torch.cat((_context(layer.key, inputs), key), dim=2)
        value = torch.cat((_context(layer.value, inputs), value), dim=2)
    # After the context was read: padding tokens of a row that went wrong write NaN into the padding block,
    # which is part of its neighbours' context.
    _write(layer, written_key, written_value, inputs.slots)
    out = layer.device.attend_prefill(query, key, value, inputs.masks[window], scale)
    return out.transpose(1, 2).reshape(-1, out.shape[1], out.shape[3])


def _write(layer: LayerCache, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    layer.key.index_copy_(0, slots, key[0].transpose(0, 1))
    layer.value.index_copy_(0, slots, value[0].transpose(0, 1))


def _split_rows(tensor: torch.Tensor, batch: int) -> torch.Tensor:
    """[1, heads, B * Q, d] -> [B, heads, Q, d]."""
    _, heads, tokens, dim = tensor.shape
    return tensor.reshape(heads, batch, tokens // batch, dim).transpose(0, 1)


def _context(cache: torch.Tensor, inputs: PrefillInputs) -> torch.Tensor:
    """Cached tokens of each row by block id, never by range: [B, kv_heads, C * block_size, d]."""
    kv_heads, dim = cache.shape[1], cache.shape[2]
    paged = cache.view(-1, inputs.block_size, kv_heads, dim)
    gathered = paged.index_select(0, inputs.context_blocks.flatten())
    return gathered.view(inputs.batch, -1, kv_heads, dim).transpose(1, 2)


def _refuse_unknown(
    mask: torch.Tensor | None, dropout: float, is_causal: bool | None, others: dict[str, Any]
) -> None:
    if mask is not None:
        raise UnsupportedAttention("an attention mask of its own")
    if dropout:
        raise UnsupportedAttention("dropout")
    if is_causal is False:
        raise UnsupportedAttention("attention that is not causal")
    unknown = sorted(name for name, value in others.items() if value is not None and name not in _NEUTRAL)
    if unknown:
        raise UnsupportedAttention(f"attention with {', '.join(unknown)}")


AttentionInterface.register(IMPLEMENTATION, paged_attention)
