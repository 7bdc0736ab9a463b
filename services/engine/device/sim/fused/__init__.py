"""Fused kernels of `torch.ops.hpu`, computed by plain torch on the host."""

from __future__ import annotations
