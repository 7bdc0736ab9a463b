"""Mixtures of experts whose tensors' shapes depend on the number of tokens alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.functional import linear

from services.engine.device import Device
from services.engine.model.decoder.shard import Shard
from services.engine.model.decoder.spec import DecoderSpec, ExpertSpec
from services.engine.model.loading import Part


class Router(nn.Module):
    """Chooses experts for each token by the softmax of one product."""

    def __init__(self, hidden_size: int, spec: ExpertSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.count, hidden_size), requires_grad=False)
        self._per_token = spec.per_token
        self._normalize = spec.normalize
        self._rounded = spec.rounded

    def placements(self) -> Mapping[str, tuple[Part, ...]]:
        """The checkpoint tensors that each parameter is made of."""
        return {"weight": (Part.whole(tuple(self.weight.shape)),)}

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden] -> (weights [T, k], expert ids int64 [T, k])."""
        probabilities = torch.softmax(linear(x, self.weight), dim=-1, dtype=torch.float32)
        weights, ids = torch.topk(probabilities, self._per_token, dim=-1)
        if self._normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return (weights.to(x.dtype) if self._rounded else weights), ids


class Experts(nn.Module):
    """The experts' weights, stacked: gate_up [experts, 2 * size, hidden], down [experts, hidden, size].

    Every rank has a share of each expert.
    """

    def __init__(self, spec: DecoderSpec, experts: ExpertSpec, shard: Shard, device: Device) -> None:
        super().__init__()
        hidden, size, self.experts = spec.hidden_size, experts.intermediate_size, experts.count
        start, own = shard.split(size, "size of an expert")
        self.gate_up = nn.Parameter(torch.empty(self.experts, 2 * own, hidden), requires_grad=False)
        self.down = nn.Parameter(torch.empty(self.experts, hidden, own), requires_grad=False)
        self._parts = {
            "gate_up": (
                Part("gate", (size, hidden), 0, start, own, 0),
                Part("up", (size, hidden), 0, start, own, own),
            ),
            "down": (Part("whole", (hidden, size), 1, start, own, 0),),
        }
        self._activation = spec.activation
        self._device = device
        self._reduce = shard.reduce

    def placements(self) -> Mapping[str, tuple[Part, ...]]:
        """The checkpoint tensors that one expert's parameters are made of."""
        return self._parts

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """x [T, hidden], weights and ids [T, k] -> [T, hidden]."""
        own = self._device.experts(x, weights, ids, self.gate_up, self.down, self._activation)
        return self._reduce(own)


class ExpertMlp(nn.Module):
    """Router and experts in the place of an MLP."""

    def __init__(self, spec: DecoderSpec, experts: ExpertSpec, shard: Shard, device: Device) -> None:
        super().__init__()
        self.router = Router(spec.hidden_size, experts)
        self.experts = Experts(spec, experts, shard, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        weights, ids = self.router(x)
        result: torch.Tensor = self.experts(x, weights, ids)
        return result
