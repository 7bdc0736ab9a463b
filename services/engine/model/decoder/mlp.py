"""The gated MLP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import nn
from torch.nn.functional import gelu, silu

from services.engine.model.decoder.linears import MergedColumnParallelLinear, RowParallelLinear
from services.engine.model.decoder.shard import Shard
from services.engine.model.decoder.spec import DecoderSpec

Activation = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {"silu": silu, "gelu": gelu, "gelu_pytorch_tanh": partial(gelu, approximate="tanh")}
)


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
