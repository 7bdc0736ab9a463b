"""Devices: the only place of the engine that names a vendor."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from catenary.devices import DEVICES
from services.engine.device.attention import HIDDEN, NO_FEATURES, AttentionFeatures
from services.engine.device.base import (
    DTYPES,
    Capabilities,
    Device,
    DeviceError,
    Execution,
    ExecutionMode,
    Forward,
    HostCopy,
    Kernels,
    Memory,
    ShapeKey,
    Stream,
    Submitted,
    execution_mode,
    failed,
    shape_key,
)
from services.engine.device.hpu import hpu_settings, warn_idle
from services.engine.device.kernels import ACTIVATIONS, grouped_mm, plain_grouped_mm
from services.engine.device.memory import MemoryFigures, MemoryUse
from services.engine.device.native import (
    Chooser,
    NativeDecoder,
    NativeExperts,
    NativeLayer,
    NativeLinear,
    NativeLinears,
    NativeMlp,
    NativeProduct,
    NativeRope,
    NativeSpec,
)

if TYPE_CHECKING:
    from services.engine.options import EngineOptions

__all__ = [
    "ACTIVATIONS",
    "DTYPES",
    "HIDDEN",
    "NO_FEATURES",
    "AttentionFeatures",
    "Capabilities",
    "Chooser",
    "Device",
    "DeviceError",
    "Execution",
    "ExecutionMode",
    "Forward",
    "HostCopy",
    "Kernels",
    "Memory",
    "MemoryFigures",
    "MemoryUse",
    "NativeDecoder",
    "NativeExperts",
    "NativeLayer",
    "NativeLinear",
    "NativeLinears",
    "NativeMlp",
    "NativeProduct",
    "NativeRope",
    "NativeSpec",
    "ShapeKey",
    "Stream",
    "Submitted",
    "execution_mode",
    "failed",
    "grouped_mm",
    "open_device",
    "plain_grouped_mm",
    "shape_key",
]


def open_device(options: EngineOptions) -> Device:
    """Open the device that the options name. Raises DeviceError; ValueError for options that contradict."""
    mode = execution_mode(
        options.device,
        compiled=options.compile,
        enforce_eager=options.enforce_eager,
        lazy=os.environ.get("PT_HPU_LAZY_MODE"),
    )
    warn_idle(options.device, mode, hpu_settings(options))
    # Only then: it may load a vendor's package, and the simulated one registers a device with torch for good.
    module = importlib.import_module(DEVICES[options.device].module)
    device: Device = module.open_device(options, mode)
    return device
