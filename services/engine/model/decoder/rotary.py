"""Rotary position embedding of queries and keys."""

from __future__ import annotations

import torch
from torch import nn

from services.engine.model.decoder.spec import RopeSpec


class Rotary(nn.Module):
    """Cosines and sines of one rotary embedding; the layers that share it get what one forward computed."""

    frequencies: torch.Tensor

    def __init__(self, spec: RopeSpec, device: torch.device) -> None:
        super().__init__()
        # float32 whatever the model's type: positions of a long context need it.
        wide = torch.tensor(spec.frequencies, dtype=torch.float32, device=device)
        self.register_buffer("frequencies", wide, persistent=False)
        self._factor = spec.factor

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [T] -> (cos, sin), each [T, 1, rotated dimensions] in `dtype`."""
        angles = positions.unsqueeze(1).float() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
        return (angles.cos() * self._factor).to(dtype), (angles.sin() * self._factor).to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, d]; cos, sin [T, 1, r]. The first r of d dimensions rotated, halves paired; like x."""
    rotated = cos.shape[-1]
    if rotated == x.shape[-1]:
        return _rotate_all(x, cos, sin)
    return torch.cat((_rotate_all(x[..., :rotated], cos, sin), x[..., rotated:]), dim=-1)


def _rotate_all(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
