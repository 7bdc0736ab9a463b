"""NVIDIA GPUs: CUDA graphs for each bucket and torch's fused attention."""

from __future__ import annotations

from services.engine.device.cuda.device import CudaDevice

__all__ = ["CudaDevice"]
