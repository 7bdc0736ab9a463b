"""The kernels of an HPU: each fused one where there is one, else a reference in torch's operations.

References use operations that every HPU has, with shapes that are known beforehand. Source of the kernels:
docs/gaudi-facts.md 4.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from catenary.gaudi import needs_float32_scores
from catenary.telemetry import get_logger
from services.engine.device.base import DTYPES, DeviceError, Kernels
from services.engine.device.hpu.attention import attend_decode, attend_prefill
from services.engine.device.hpu.fused import FusedKernels, for_model
from services.engine.device.hpu.settings import HpuSettings
from services.engine.device.kernels import ACTIVATIONS
from services.engine.device.kernels import rotate as plain_rotate

log = get_logger(__name__)

# The activation that the fused experts and torch agree on; their gelu may be another approximation.
_FUSED_ACTIVATION = "silu"


class HpuKernels(Kernels):
    """Kernels of one card, for one model after `adapt`."""

    groups_products = False

    def __init__(self, fused: FusedKernels, settings: HpuSettings) -> None:
        self._said = False
        self.use(fused, settings)

    def use(self, fused: FusedKernels, settings: HpuSettings) -> None:
        """Take these fused kernels, and attention as these settings have it."""
        self.fused = fused
        self.settings = settings
        self.attend_prefill = partial(attend_prefill, fused, settings.attention)
        self.attend_decode = partial(attend_decode, fused, settings.attention.softmax)

    def adapt(self, config: Mapping[str, Any]) -> None:
        needed = needs_float32_scores(str(config.get("model_type", "")))
        settings, fused = for_model(self.settings, self.fused, float32_scores=needed)
        self.use(fused, settings)

    def choose_dtype(self, requested: str, checkpoint: torch.dtype | None) -> torch.dtype:
        """Return bfloat16 but for an explicit float32; log once why. Raises DeviceError."""
        if requested != "auto" and requested not in DTYPES:
            raise DeviceError(f"dtype {requested!r} is unknown; choose auto, {', '.join(DTYPES)}")
        if requested == "float32":
            self._say("float32 was asked for: an HPU is several times as fast in bfloat16")
            return torch.float32
        if requested == "float16":
            self._say("an HPU computes in bfloat16 what was asked for in float16")
        elif requested == "auto" and checkpoint not in (None, torch.bfloat16):
            name = str(checkpoint).removeprefix("torch.")
            self._say(f"a checkpoint in {name} runs in bfloat16 on an HPU: dtype float32 keeps its precision")
        return torch.bfloat16

    def _say(self, text: str) -> None:
        if not self._said:
            self._said = True
            log.warning(text)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, unit_offset: bool = False
    ) -> torch.Tensor:
        if self.fused.rms_norm is None:
            return plain_rms_norm(x, weight, eps, unit_offset=unit_offset)
        # The kernel knows three dimensions alone.
        given = x if x.dim() == 3 else x.reshape(1, -1, x.shape[-1])
        if unit_offset:
            # One plus a small weight has no room in bfloat16.
            given, weight = given.float(), weight.float() + 1.0
        normed: torch.Tensor = self.fused.rms_norm.apply(given, weight, eps)
        return normed.to(x.dtype).view(x.shape)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if self.fused.rotary is None:
            return plain_rotate(x, cos, sin)
        rotated = cos.shape[-1]
        part: torch.Tensor = self.fused.rotary(x[..., :rotated], cos, sin, None, 0, self.fused.rotary_mode)
        return part if rotated == x.shape[-1] else torch.cat((part, x[..., rotated:]), dim=-1)

    def experts(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        activation: str,
    ) -> torch.Tensor:
        if self.fused.experts is None or activation != _FUSED_ACTIVATION:
            return plain_experts(x, weights, ids, gate_up, down, activation)
        out: torch.Tensor = self.fused.experts(
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


def plain_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, unit_offset: bool) -> torch.Tensor:
    """Compute FusedRMSNorm in torch's operations."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (normed * (1.0 + weight.float())).to(x.dtype)
    return normed.to(x.dtype) * weight


def plain_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """Compute mixture_of_experts in torch's operations: every expert computes all tokens, weighted by choice.

    The grouped product of `sorted_experts` is not among the HPU's operations, and sorting tokens by expert
    without it gives shapes that depend on the choice.
    """
    act = ACTIVATIONS[activation]
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for index in range(gate_up.shape[0]):
        share = (weights.float() * (ids == index)).sum(-1, keepdim=True)
        gate, up = torch.matmul(x, gate_up[index].t()).chunk(2, dim=-1)
        total = total + torch.matmul(act(gate) * up, down[index].t()).float() * share
    return total.to(x.dtype)
