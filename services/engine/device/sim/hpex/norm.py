"""`FusedRMSNorm` (gaudi-facts.md 4.5)."""

from __future__ import annotations

from typing import Any

import torch


class FusedRMSNorm(torch.autograd.Function):
    """The bridge's RMS norm, for inference."""

    @staticmethod
    def forward(
        ctx: Any,
        data_in: torch.Tensor,
        gamma: torch.Tensor,
        eps: float,
        use_stages: bool = True,
        bwd_mode: int = 0,
        fast_math: bool = False,
    ) -> torch.Tensor:
        """x [batch, tokens, hidden] in three dimensions; gamma [hidden]. Raises RuntimeError for others.

        `use_stages` and `bwd_mode` choose kernels for gradients. Of x's dtype, or float32 if gamma's differs.
        """
        if fast_math:
            raise RuntimeError("the simulator's FusedRMSNorm has no fast_math")
        normed: torch.Tensor = torch.ops.hpu.rms_norm(data_in, gamma, eps)[0]
        return normed
