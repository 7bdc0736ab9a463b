"""The CPU as a device, with kernels of its own in native/."""

from __future__ import annotations

from services.engine.device.cpu.device import CpuDevice

__all__ = ["CpuDevice"]
