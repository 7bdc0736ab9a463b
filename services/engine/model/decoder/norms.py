"""Root mean square norms, alone and fused with the residual addition before them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from services.engine.device import Device
from services.engine.model.loading import Part


class RmsNorm(nn.Module):
    """A norm with the weight of a checkpoint, as `Device.rms_norm` describes it."""

    def __init__(
        self,
        size: int,
        eps: float,
        device: Device,
        *,
        unit_offset: bool = False,
        residual_multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        self._device = device
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self._eps = eps
        self._unit_offset = unit_offset
        self._multiplier = residual_multiplier

    def placements(self) -> Mapping[str, tuple[Part, ...]]:
        """The checkpoint tensors that each parameter is made of."""
        return {"weight": (Part.whole(tuple(self.weight.shape)),)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]."""
        return self._device.rms_norm(x, self.weight, self._eps, unit_offset=self._unit_offset)

    def wide_weight(self) -> torch.Tensor:
        """What the normed numbers are multiplied by, float32 [size], the offset of one added."""
        return self.weight.data.float() + (1.0 if self._unit_offset else 0.0)

    def fused(self, delta: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds `delta` to the residual stream and norms the sum: [T, size] x2 -> (normed, residual)."""
        if self._multiplier != 1.0:
            delta = delta * self._multiplier
        residual = residual + delta
        return self.forward(residual), residual
