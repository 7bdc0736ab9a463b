"""One decoder layer."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from services.engine.device import Device
from services.engine.model.decoder.attention import BatchInputs, DecoderAttention
from services.engine.model.decoder.experts import ExpertMlp
from services.engine.model.decoder.mlp import GatedMlp
from services.engine.model.decoder.norms import RmsNorm
from services.engine.model.decoder.shard import Shard
from services.engine.model.decoder.spec import DecoderSpec, LayerPlan


class DecoderLayer(nn.Module):
    """Attention and MLP (or experts), each after a norm that is fused with the residual addition before it.

    It gives what is still to be added to the residual stream beside the stream itself, so that the next norm
    adds it. Nothing in it depends on which layer it is: layers of the same plan share compiled code.
    """

    def __init__(self, spec: DecoderSpec, plan: LayerPlan, shard: Shard, device: Device) -> None:
        super().__init__()
        norm = partial(RmsNorm, spec.hidden_size, spec.norm_eps, device, unit_offset=spec.unit_offset_norm)
        self.attention_norm = norm(residual_multiplier=spec.residual_multiplier)
        self.attention = DecoderAttention(spec, plan, shard, device)
        self.attention_post_norm = norm() if spec.sandwich_norms else None
        self.mlp_norm = norm(residual_multiplier=spec.residual_multiplier)
        self.mlp: GatedMlp | ExpertMlp = (
            ExpertMlp(spec, spec.experts, shard, device)
            if plan.experts and spec.experts
            else GatedMlp(spec, shard)
        )
        self.mlp_post_norm = norm() if spec.sandwich_norms else None

    def forward(
        self,
        delta: torch.Tensor,
        residual: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        inputs: BatchInputs,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """delta, residual [T, hidden]; cos, sin [T, 1, rotated] -> (delta, residual)."""
        normed, residual = self.attention_norm.fused(delta, residual)
        delta = self.attention(normed, cos, sin, inputs)
        if self.attention_post_norm is not None:
            delta = self.attention_post_norm(delta)
        normed, residual = self.mlp_norm.fused(delta, residual)
        delta = self.mlp(normed)
        if self.mlp_post_norm is not None:
            delta = self.mlp_post_norm(delta)
        return delta, residual
