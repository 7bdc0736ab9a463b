"""Mixtures of experts of transformers, computed in static shapes.

transformers' own loop over the experts that were hit has shapes that follow from the router's choice: each
would be a graph of its own. Here only the number of tokens counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any, Protocol

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from services.engine.device import Kernels, grouped_mm, plain_grouped_mm

IMPLEMENTATION = "catenary_static"

_KERNELS = "catenary_kernels"

# The grouped product wants rows of whole 16-byte units.
_ALIGNMENT = 16


def use_static_experts(model: Any, kernels: Kernels) -> None:
    """Makes a loaded model's experts run in static shapes; models without experts stay as they are."""
    if model._can_set_experts_implementation():
        model.set_experts_implementation(IMPLEMENTATION)
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
    """Whether the experts are what `Device.experts` computes."""
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
    """Sorts the T * k pairs of token and expert by expert, computes, and sums each token's results."""
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


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, static_experts)
