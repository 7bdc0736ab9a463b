"""Devices: the only place of the engine that names a vendor."""

from __future__ import annotations

from services.engine.device.base import DTYPES, Device, DeviceError, MemoryFigures
from services.engine.device.cpu import CpuDevice
from services.engine.device.flat import HIDDEN

__all__ = [
    "DTYPES",
    "HIDDEN",
    "CpuDevice",
    "Device",
    "DeviceError",
    "MemoryFigures",
    "open_device",
]


def open_device(name: str, *, threads: int | None = None) -> Device:
    """Opens the device that the `--device` option names. Raises DeviceError."""
    if name == "cpu":
        return CpuDevice(threads)
    raise DeviceError(f"device {name!r} is not supported yet; choose cpu")
