"""The CPU as a device, with kernels of its own in native/."""

from __future__ import annotations

from services.engine.device.cpu.device import CpuDevice, open_device
from services.engine.device.cpu.settings import CpuSettings, KernelChoice, Quantization, cpu_settings, cpus_of
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
    "cpu_settings",
    "cpus_of",
    "open_device",
]
