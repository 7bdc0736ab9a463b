"""The CPU as a device, with kernels of its own in native/."""

from __future__ import annotations

from services.engine.device.cpu.device import CpuDevice
from services.engine.device.cpu.settings import CpuSettings, KernelChoice, Quantization
from services.engine.device.cpu.structures import Linear, Operand, WeightKind
from services.engine.device.cpu.threads import Team

__all__ = [
    "CpuDevice",
    "CpuSettings",
    "KernelChoice",
    "Linear",
    "Operand",
    "Quantization",
    "Team",
    "WeightKind",
]
