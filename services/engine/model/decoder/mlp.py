"""The gated MLP."""

from __future__ import annotations

import torch
from torch import nn

from services.engine.device import ACTIVATIONS
from services.engine.model.decoder.linears import MergedColumnParallelLinear, RowParallelLinear
from services.engine.model.decoder.shard import Shard
from services.engine.model.decoder.spec import DecoderSpec


class GatedMlp(nn.Module):
    """down(activation(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, spec: DecoderSpec, shard: Shard) -> None:
        super().__init__()
        size = spec.intermediate_size
        self.gate_up = MergedColumnParallelLinear(
            spec.hidden_size, {"gate": size, "up": size}, spec.mlp_bias, shard
        )
        self.down = RowParallelLinear(size, spec.hidden_size, spec.mlp_bias, shard)
        self._activation = ACTIVATIONS[spec.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        result: torch.Tensor = self.down(self._activation(gate) * up)
        return result
