"""Devices: the only place of the engine that names a vendor."""

from __future__ import annotations

import importlib

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
from services.engine.device.cpu import CpuDevice, CpuSettings, KernelChoice, Quantization
from services.engine.device.cuda import CudaDevice
from services.engine.device.hpu import (
    AttentionSettings,
    HpuSettings,
    RecipeCache,
    Softmax,
    StepLog,
    open_hpu,
    prepare_environment,
)
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

__all__ = [
    "ACTIVATIONS",
    "DTYPES",
    "HIDDEN",
    "NO_FEATURES",
    "AttentionFeatures",
    "AttentionSettings",
    "Capabilities",
    "Chooser",
    "CpuDevice",
    "CpuSettings",
    "Device",
    "DeviceError",
    "Execution",
    "ExecutionMode",
    "Forward",
    "HostCopy",
    "HpuSettings",
    "KernelChoice",
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
    "Quantization",
    "RecipeCache",
    "ShapeKey",
    "Softmax",
    "StepLog",
    "Stream",
    "Submitted",
    "execution_mode",
    "failed",
    "grouped_mm",
    "open_device",
    "plain_grouped_mm",
    "shape_key",
]


def open_device(
    name: str,
    *,
    threads: int | None = None,
    mode: ExecutionMode = ExecutionMode.EAGER,
    hpu: HpuSettings | None = None,
    cpu: CpuSettings | None = None,
) -> Device:
    """Opens the device that the `--device` option names, to execute in `mode`.

    `threads` and `cpu` are of a CPU, `hpu` of an HPU, real (hpu) or simulated (sim). Raises DeviceError.
    """
    if name == "cpu":
        return CpuDevice(threads, mode, cpu)
    if name == "sim":
        # Imported when it is asked for: it registers a device with torch, for good. Like the bridge that it
        # stands in for, it reads the environment once.
        prepare_environment(mode)
        importlib.import_module("services.engine.device.sim").install()
    if name in ("hpu", "sim"):
        return open_hpu(mode, hpu or HpuSettings())
    if name == "cuda":
        return CudaDevice(mode)
    raise DeviceError(f"device {name!r} is unknown; choose cpu, cuda, hpu or sim")
