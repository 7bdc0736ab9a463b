"""Our paged attention, registered as an attention implementation of transformers.

A model calls it once per layer with the new tokens' query, key and value. What the batch looks like travels
as the keyword `paged`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from services.engine.device import NO_FEATURES, AttentionFeatures, Kernels
from services.engine.model.attention import DecodeInputs, LayerCache, LayerSpec, PrefillInputs, Window, attend

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

    kernels: Kernels
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
    sliding_window: Window = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    paged: PrefillInputs | DecodeInputs | Probe | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, T, d], key and value [1, kv_heads, T, d | dv] -> [1, T, heads, dv].

    The batch is flattened: T is rows times tokens per row. Raises UnsupportedAttention for anything asked
    that is not done here, since an ignored option would give wrong tokens in silence.
    """
    _refuse_unknown(attention_mask, dropout, is_causal, others)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    features = (
        AttentionFeatures(softcap=softcap, sinks=s_aux) if softcap or s_aux is not None else NO_FEATURES
    )
    if isinstance(paged, Probe):
        paged.meet(module, key, value, sliding_window)
        out = paged.kernels.attend_prefill(query, key, value, None, scale, features)
        return out.transpose(1, 2), None
    if paged is None:
        raise UnsupportedAttention("a forward without the engine's inputs")
    rows, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    layer = cache_of(module)
    out = attend(layer, rows, keys, values, paged, window=sliding_window, scale=scale, features=features)
    return out.unsqueeze(0), None


def _refuse_unknown(
    mask: torch.Tensor | None, dropout: float, is_causal: bool | None, others: dict[str, Any]
) -> None:
    if mask is not None:
        raise UnsupportedAttention("a mask of its own")
    if dropout:
        raise UnsupportedAttention("dropout")
    if is_causal is False:
        raise UnsupportedAttention("attention that is not causal")
    unknown = sorted(name for name, value in others.items() if value is not None and name not in _NEUTRAL)
    if unknown:
        raise UnsupportedAttention(f"attention with {', '.join(unknown)}")


AttentionInterface.register(IMPLEMENTATION, paged_attention)
