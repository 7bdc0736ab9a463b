"""Norms, rotations and mixtures of experts on an HPU: the fused kernel, or its twin in plain operations.

Twins use what every HPU has, with shapes that are known beforehand. Source of the kernels: gaudi-facts.md
4.5.
"""

from __future__ import annotations

import torch

from services.engine.device.hpu.probing import Kernels
from services.engine.device.kernels import ACTIVATIONS
from services.engine.device.kernels import rotate as plain_rotate

# The activation that the fused experts and torch agree on; their gelu may be another approximation.
_FUSED_ACTIVATION = "silu"


def rms_norm(
    kernels: Kernels, x: torch.Tensor, weight: torch.Tensor, eps: float, *, unit_offset: bool
) -> torch.Tensor:
    """Implements `Device.rms_norm`."""
    if kernels.rms_norm is None:
        return plain_rms_norm(x, weight, eps, unit_offset=unit_offset)
    # The kernel knows three dimensions alone.
    given = x if x.dim() == 3 else x.reshape(1, -1, x.shape[-1])
    if unit_offset:
        # One plus a small weight has no room in bfloat16.
        given, weight = given.float(), weight.float() + 1.0
    normed: torch.Tensor = kernels.rms_norm.apply(given, weight, eps)
    return normed.to(x.dtype).view(x.shape)


def plain_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, unit_offset: bool) -> torch.Tensor:
    """The twin of FusedRMSNorm."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (normed * (1.0 + weight.float())).to(x.dtype)
    return normed.to(x.dtype) * weight


def rotate(kernels: Kernels, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Implements `Device.rotate`; the twin of the fused rotation is the common one."""
    if kernels.rotary is None:
        return plain_rotate(x, cos, sin)
    rotated = cos.shape[-1]
    part: torch.Tensor = kernels.rotary(x[..., :rotated], cos, sin, None, 0, kernels.rotary_mode)
    return part if rotated == x.shape[-1] else torch.cat((part, x[..., rotated:]), dim=-1)


def experts(
    kernels: Kernels,
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """Implements `Device.experts`."""
    if kernels.experts is None or activation != _FUSED_ACTIVATION:
        return plain_experts(x, weights, ids, gate_up, down, activation)
    out: torch.Tensor = kernels.experts(
        hidden_states=x,
        expert_routing_table=ids,
        router_weights=weights.to(x.dtype),
        w12=list(gate_up.unbind(0)),
        w3=list(down.unbind(0)),
        # As nn.Linear keeps them: [out, in].
        permuted_weights=True,
        activation=activation,
        experts_min=0,
        experts_max=gate_up.shape[0] - 1,
    )
    return out


def plain_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """The twin of mixture_of_experts: every expert computes all tokens, and counts for those that chose it.

    The grouped product of the CPU's way is not among the HPU's operations, and sorting tokens by expert
    without it gives shapes that depend on the choice.
    """
    act = ACTIVATIONS[activation]
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for index in range(gate_up.shape[0]):
        share = (weights.float() * (ids == index)).sum(-1, keepdim=True)
        gate, up = torch.matmul(x, gate_up[index].t()).chunk(2, dim=-1)
        total = total + torch.matmul(act(gate) * up, down[index].t()).float() * share
    return total.to(x.dtype)
