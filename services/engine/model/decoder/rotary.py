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
