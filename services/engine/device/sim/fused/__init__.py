"""Fused kernels of `torch.ops.hpu`, computed by plain torch on the host. gaudi-facts.md 4.5."""

from __future__ import annotations

from services.engine.device.sim.fused.library import Kernel, provide
from services.engine.device.sim.fused.rules import NOISE, Window
from services.engine.device.sim.fused.schemas import FusedOp, existing_ops

__all__ = ["NOISE", "FusedOp", "Kernel", "Window", "existing_ops", "provide"]
