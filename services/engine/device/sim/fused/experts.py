"""The mixture-of-experts kernel (gaudi-facts.md 4.5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from services.engine.device.sim.fused.rules import require

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "relu": torch.nn.functional.relu,
}


def mixture_of_experts(
    hidden_states: torch.Tensor,
    expert_routing_table: torch.Tensor,
    router_weights: torch.Tensor,
    w1: Sequence[torch.Tensor],
    w2: Sequence[torch.Tensor],
    w3: Sequence[torch.Tensor],
    permuted_weights: bool,
    activation: str,
    experts_min: int,
    experts_max: int,
) -> torch.Tensor:
    """`torch.ops.hpu.mixture_of_experts`: sum over a token's experts of weight * (act(x w1) * (x w2)) w3.

    hidden_states [tokens, hidden]; routing table and weights [tokens, experts per token]; w1 and w2
    [hidden, inner] and w3 [inner, hidden], or transposed with `permuted_weights` (as nn.Linear keeps them).
    The lists hold the experts experts_min to experts_max, both included; others contribute nothing, so that
    cards can share the experts. Raises RuntimeError.
    """
    count = experts_max - experts_min + 1
    require(
        len(w1) == len(w2) == len(w3) == count,
        f"mixture_of_experts: experts {experts_min}..{experts_max} need {count} weights in each list",
    )
    require(activation in _ACTIVATIONS, f"mixture_of_experts: no activation {activation!r}")
    require(hidden_states.dim() == 2, "mixture_of_experts: hidden_states must be [tokens, hidden]")
    require(
        expert_routing_table.dtype in (torch.int32, torch.int64),
        "mixture_of_experts: expert_routing_table must hold integers",
    )
    require(
        all(one.dtype is hidden_states.dtype for one in (router_weights, *w1, *w2, *w3)),
        "mixture_of_experts: hidden_states, router_weights and the experts' weights must have one dtype",
    )
    act = _ACTIVATIONS[activation]
    out = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for index in range(count):
        chosen = expert_routing_table == experts_min + index
        weight = (router_weights.float() * chosen).sum(-1, keepdim=True)
        gate, up, down = (w.t() if permuted_weights else w for w in (w1[index], w2[index], w3[index]))
        inner = act(torch.matmul(hidden_states, gate)) * torch.matmul(hidden_states, up)
        out += torch.matmul(inner, down).float() * weight
    return out.to(hidden_states.dtype)


def mixture_of_experts_fused_weights(
    hidden_states: torch.Tensor,
    expert_routing_table: torch.Tensor,
    router_weights: torch.Tensor,
    w12: Sequence[torch.Tensor],
    w3: Sequence[torch.Tensor],
    permuted_weights: bool,
    activation: str,
    experts_min: int,
    experts_max: int,
) -> torch.Tensor:
    """`mixture_of_experts.fused_weights`: w12 joins w1 and w2 along their inner dimension, w1 first."""
    halves = [w.chunk(2, dim=0 if permuted_weights else 1) for w in w12]
    return mixture_of_experts(
        hidden_states,
        expert_routing_table,
        router_weights,
        [first for first, _ in halves],
        [second for _, second in halves],
        w3,
        permuted_weights,
        activation,
        experts_min,
        experts_max,
    )
