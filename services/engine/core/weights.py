"""Whether a model's weights fit a device, before any of them is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.engine.device import DTYPES, Device
from services.engine.memory import InsufficientMemory

_GIB = 2**30


def check_weights_fit(directory: Path, config: Mapping[str, Any], dtype: str, device: Device) -> None:
    """Compares the size of the files, converted to the dtype of the computation, with what is free.

    config: the content of config.json. Raises InsufficientMemory with both numbers, DeviceError for a dtype
    that the device does not know.
    """
    stored = DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch."))
    chosen = device.choose_dtype(dtype, stored)
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    needed = size if stored is None else size * chosen.itemsize // stored.itemsize
    free = device.memory().free
    if needed > free:
        raise InsufficientMemory(
            f"the model's weights take {needed / _GIB:.2f} GiB in {str(chosen).removeprefix('torch.')} and "
            f"{free / _GIB:.2f} GiB of the device's memory are free: choose a smaller model or dtype"
        )
