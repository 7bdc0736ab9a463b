"""Root mean square norms, alone and fused with the residual addition before them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.functional import rms_norm

from services.engine.model.loading import Part


class RmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps), computed in float32, times the weight.

    unit_offset: the scale is 1 + weight and applied in float32, before the result is rounded (gemma);
    otherwise rounding comes first (llama).
    """

    def __init__(
        self, size: int, eps: float, *, unit_offset: bool = False, residual_multiplier: float = 1.0
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self._eps = eps
        self._unit_offset = unit_offset
        self._multiplier = residual_multiplier

    def placements(self) -> Mapping[str, tuple[Part, ...]]:
        """The checkpoint tensors that each parameter is made of."""
        return {"weight": (Part.whole(tuple(self.weight.shape)),)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]."""
        if self._unit_offset:
            wide = rms_norm(x.float(), self.weight.shape, eps=self._eps)
            return (wide * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * rms_norm(x, self.weight.shape, eps=self._eps)

    def fused(self, delta: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds `delta` to the residual stream and norms the sum: [T, size] x2 -> (normed, residual)."""
        if self._multiplier != 1.0:
            delta = delta * self._multiplier
        residual = residual + delta
        return self.forward(residual), residual
