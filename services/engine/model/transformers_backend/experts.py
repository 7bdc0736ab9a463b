"""Mixtures of experts of transformers, computed in static shapes.

transformers' own loop over the experts that were hit has shapes that follow from the router's choice: each
would be a graph of its own. Here only the number of tokens counts.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.nn.functional import grouped_mm
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

IMPLEMENTATION = "catenary_static"

# The grouped product wants rows of whole 16-byte units.
_ALIGNMENT = 16


def use_static_experts(model: Any) -> None:
    """Makes a loaded model's experts run in static shapes; models without experts stay as they are."""
    if model._can_set_experts_implementation():
        model.set_experts_implementation(IMPLEMENTATION)
    for module in model.modules():
        # Not one of those that transformers lets choose their implementation.
        if type(module).__name__ == "DbrxExperts":
            module.forward = MethodType(_dbrx_experts, module)


def static_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """hidden_states [T, H]; top_k_index and top_k_weights [T, k] -> [T, H]."""

    def up(rows: torch.Tensor, ids: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        name = "gate_up_proj" if module.has_gate else "up_proj"
        out = _product(module, name, rows, ids, ends)
        activated: torch.Tensor = module._apply_gate(out) if module.has_gate else module.act_fn(out)
        return activated

    def expert(rows: torch.Tensor, ids: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        out = _product(module, "down_proj", up(rows, ids, ends), ids, ends)
        normed: torch.Tensor = module.post_expert_norm(out) if module.has_post_expert_norm else out
        return normed

    return _by_expert(hidden_states, top_k_index, top_k_weights, module.num_experts, expert)


def _product(
    module: Any, name: str, rows: torch.Tensor, ids: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    weight = getattr(module, name)
    out = grouped_product(rows, weight if module.is_transposed else weight.transpose(1, 2), ends)
    return out + getattr(module, f"{name}_bias").index_select(0, ids) if module.has_bias else out


def _dbrx_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The forward of DbrxExperts: hidden_states [1, T, H] -> [1, T, H]."""
    mlp = module.mlp
    shape = (module.num_experts, module.ffn_hidden_size, module.hidden_size)
    gate, up, down = (weight.view(shape) for weight in (mlp.w1, mlp.v1, mlp.w2))

    def expert(rows: torch.Tensor, ids: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        gated = mlp.activation_fn(grouped_product(rows, gate.transpose(1, 2), ends))
        return grouped_product(gated * grouped_product(rows, up.transpose(1, 2), ends), down, ends)

    rows = hidden_states.reshape(-1, module.hidden_size)
    out = _by_expert(rows, top_k_index, top_k_weights, module.num_experts, expert)
    return out.view(hidden_states.shape)


def _by_expert(
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    experts: int,
    compute: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Sorts the T * k pairs of token and expert by expert, computes, and sums each token's results.

    compute: rows [T * k, H] sorted by expert, expert ids [T * k], the end of each expert's rows int32
    [experts] -> [T * k, H].
    """
    per_token = index.shape[1]
    ids, order = torch.sort(index.flatten(), stable=True)
    ends = torch.searchsorted(ids, torch.arange(experts, device=ids.device), right=True).to(torch.int32)
    out = compute(hidden.index_select(0, order // per_token), ids, ends)
    out = out * weights.flatten().index_select(0, order).unsqueeze(1)
    restored = torch.empty_like(out).index_copy_(0, order, out)
    return restored.view(-1, per_token, hidden.shape[1]).sum(1, dtype=torch.float32).to(hidden.dtype)


def grouped_product(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """rows [S, in], of which group e has those from ends[e - 1] to ends[e]; weight [groups, in, out].

    Returns [S, out]. Where the sizes do not suit the grouped kernel, every group multiplies all rows.
    """
    if not (rows.shape[1] * rows.itemsize % _ALIGNMENT or weight.shape[2] * rows.itemsize % _ALIGNMENT):
        return grouped_mm(rows, weight, offs=ends)
    positions = torch.arange(rows.shape[0], device=rows.device).unsqueeze(1)
    out = rows.new_zeros((rows.shape[0], weight.shape[2]))
    # Backwards: a later, smaller end overwrites the rows that are not this group's.
    for group in range(weight.shape[0] - 1, -1, -1):
        out = torch.where(positions < ends[group], rows @ weight[group], out)
    return out


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, static_experts)
