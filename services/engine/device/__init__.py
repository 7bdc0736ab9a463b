"""Devices: the only place of the engine that names a vendor."""

from __future__ import annotations

from services.engine.device.base import DTYPES, Device, DeviceError, Forward
from services.engine.device.cpu import CpuDevice
from services.engine.device.features import NO_FEATURES, AttentionFeatures
from services.engine.device.flat import HIDDEN
from services.engine.device.kernels import ACTIVATIONS, Activation
from services.engine.device.memory import MemoryFigures, MemoryUse
from services.engine.device.modes import ExecutionMode, execution_mode
from services.engine.device.shapes import ShapeKey, shape_key
from services.engine.device.work import HostCopy, Submitted, failed

__all__ = [
    "ACTIVATIONS",
    "DTYPES",
    "HIDDEN",
    "NO_FEATURES",
    "Activation",
    "AttentionFeatures",
    "CpuDevice",
    "Device",
    "DeviceError",
    "ExecutionMode",
    "Forward",
    "HostCopy",
    "MemoryFigures",
    "MemoryUse",
    "ShapeKey",
    "Submitted",
    "execution_mode",
    "failed",
    "open_device",
    "shape_key",
]


def open_device(
    name: str, *, threads: int | None = None, mode: ExecutionMode = ExecutionMode.EAGER
) -> Device:
    """Opens the device that the `--device` option names, to execute in `mode`. Raises DeviceError."""
    if name == "cpu":
        return CpuDevice(threads, mode)
    raise DeviceError(f"device {name!r} is not supported yet; choose cpu")
