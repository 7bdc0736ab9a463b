"""Our paged attention and our experts, registered as implementations of transformers.

A model calls the attention once per layer with the new tokens' query, key and value; the batch's inputs come
as the keyword `paged`. Experts run in static shapes: transformers' own loop over the experts that were hit
has shapes that follow from the router's choice, each of which would be a graph of its own. Here only the
number of tokens counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from services.engine.device import NO_FEATURES, AttentionFeatures, Kernels, grouped_mm, plain_grouped_mm
from services.engine.model.paged import DecodeInputs, LayerCache, LayerSpec, PrefillInputs, Window, attend

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
        """Record one layer. Raises UnsupportedAttention if it has no index of its own."""
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or index in self.layers:
            raise UnsupportedAttention("a layer with more than one attention, or none of its own")
        self.layers[index] = LayerSpec(key.shape[1], key.shape[3], value.shape[3], window)
        self.modules[index] = module


def attach_cache(module: nn.Module, cache: LayerCache) -> None:
    """Give a layer its cache: on the module, since an index into a list would be a constant of a graph."""
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


_STATIC_EXPERTS = "catenary_static"

_KERNELS = "catenary_kernels"

# The grouped product wants rows of whole 16-byte units.
_ALIGNMENT = 16


def use_static_experts(model: Any, kernels: Kernels) -> None:
    """Make a loaded model's experts run in static shapes; models without experts stay as they are."""
    if model._can_set_experts_implementation():
        model.set_experts_implementation(_STATIC_EXPERTS)
    for module in model.modules():
        # Not one of those that transformers lets choose their implementation.
        dbrx = type(module).__name__ == "DbrxExperts"
        if dbrx:
            module.forward = MethodType(_dbrx_experts, module)
        if dbrx or hasattr(module, "_apply_gate"):
            setattr(module, _KERNELS, kernels)


def static_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """hidden_states [T, H]; top_k_index and top_k_weights [T, k] -> [T, H]."""
    kernels: Kernels = getattr(module, _KERNELS)
    if not kernels.groups_products and _is_plain(module):
        return kernels.experts(
            hidden_states, top_k_weights, top_k_index, module.gate_up_proj, module.down_proj, "silu"
        )

    def expert(rows: torch.Tensor, group: Group) -> torch.Tensor:
        name = "gate_up_proj" if module.has_gate else "up_proj"
        inner = _product(module, name, rows, group)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        out = _product(module, "down_proj", inner, group)
        normed: torch.Tensor = module.post_expert_norm(out) if module.has_post_expert_norm else out
        return normed

    return _mixed(kernels, hidden_states, top_k_index, top_k_weights, module.num_experts, expert)


def _is_plain(module: Any) -> bool:
    """Return whether `Kernels.experts` computes these experts."""
    special = module.has_bias or module.is_transposed or module.has_post_expert_norm
    halves = module.has_gate and module.is_concatenated and type(module)._apply_gate is _default_apply_gate
    return halves and not special and isinstance(module.act_fn, torch.nn.SiLU)


def _product(module: Any, name: str, rows: torch.Tensor, group: Group) -> torch.Tensor:
    weight = getattr(module, name)
    out = group.product(rows, weight if module.is_transposed else weight.transpose(1, 2))
    return out + group.of_rows(getattr(module, f"{name}_bias")) if module.has_bias else out


def _dbrx_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The forward of DbrxExperts: hidden_states [1, T, H] -> [1, T, H]."""
    mlp = module.mlp
    shape = (module.num_experts, module.ffn_hidden_size, module.hidden_size)
    gate, up, down = (weight.view(shape) for weight in (mlp.w1, mlp.v1, mlp.w2))

    def expert(rows: torch.Tensor, group: Group) -> torch.Tensor:
        gated = mlp.activation_fn(group.product(rows, gate.transpose(1, 2)))
        return group.product(gated * group.product(rows, up.transpose(1, 2)), down)

    rows, kernels = hidden_states.reshape(-1, module.hidden_size), getattr(module, _KERNELS)
    out = _mixed(kernels, rows, top_k_index, top_k_weights, module.num_experts, expert)
    return out.view(hidden_states.shape)


class Group(Protocol):
    """Which expert each row is for."""

    def product(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """rows [S, in] times each one's expert's part of the weight [experts, in, out] -> [S, out]."""

    def of_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Each row's expert's part of values [experts, n]; broadcasts to [S, n]."""


@dataclass(frozen=True, slots=True)
class SortedRows:
    """Rows that lie sorted by expert: `ids` of each row's, and `ends`, as `grouped_product` takes them."""

    ids: torch.Tensor
    ends: torch.Tensor

    def product(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """By the grouped kernel."""
        return grouped_product(rows, weight, self.ends)

    def of_rows(self, values: torch.Tensor) -> torch.Tensor:
        """[S, n]."""
        return values.index_select(0, self.ids)


@dataclass(frozen=True, slots=True)
class OneExpert:
    """All rows are for one expert."""

    index: int

    def product(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """A plain product."""
        return torch.matmul(rows, weight[self.index])

    def of_rows(self, values: torch.Tensor) -> torch.Tensor:
        """[1, n]."""
        return values[self.index : self.index + 1]


Expert = Callable[[torch.Tensor, Group], torch.Tensor]


def _mixed(
    kernels: Kernels,
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    experts: int,
    compute: Expert,
) -> torch.Tensor:
    """Each token's experts' results, summed by weight: [T, H]. compute: rows [S, H] of a group -> [S, H]."""
    way = _by_expert if kernels.groups_products else _all_by_all
    return way(hidden, index, weights, experts, compute)


def _all_by_all(
    hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, experts: int, compute: Expert
) -> torch.Tensor:
    """Every expert computes all tokens, for a device that knows neither grouped products nor sorting well."""
    total = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for each in range(experts):
        share = (weights.float() * (index == each)).sum(-1, keepdim=True)
        total = total + compute(hidden, OneExpert(each)).float() * share
    return total.to(hidden.dtype)


def _by_expert(
    hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, experts: int, compute: Expert
) -> torch.Tensor:
    """Sort the T * k pairs of token and expert by expert, compute, and sum each token's results."""
    per_token = index.shape[1]
    ids, order = torch.sort(index.flatten(), stable=True)
    ends = torch.searchsorted(ids, torch.arange(experts, device=ids.device), right=True).to(torch.int32)
    out = compute(hidden.index_select(0, order // per_token), SortedRows(ids, ends))
    out = out * weights.flatten().index_select(0, order).unsqueeze(1)
    restored = torch.empty_like(out).index_copy_(0, order, out)
    return restored.view(-1, per_token, hidden.shape[1]).sum(1, dtype=torch.float32).to(hidden.dtype)


def grouped_product(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """rows [S, in], of which group e has those from ends[e - 1] to ends[e]; weight [groups, in, out].

    Returns [S, out]. The grouped kernel computes it where the sizes suit that.
    """
    if rows.shape[1] * rows.itemsize % _ALIGNMENT or weight.shape[2] * rows.itemsize % _ALIGNMENT:
        return plain_grouped_mm(rows, weight, ends)
    return grouped_mm(rows, weight, ends)


ALL_EXPERTS_FUNCTIONS.register(_STATIC_EXPERTS, static_experts)
