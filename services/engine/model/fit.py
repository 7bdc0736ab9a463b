"""Whether a model's weights fit a device, before any of them is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from services.engine.device import DTYPES, Device
from services.engine.memory import InsufficientMemory

_GIB = 2**30


def check_weights_fit(
    directory: Path, config: Mapping[str, Any], dtype: str, device: Device, *, native: bool = True
) -> None:
    """Compares the size of the files, converted to what the device keeps, with what is free.

    config: the content of config.json. native: whether `Device.native_decoder` may compute the model, which
    never takes more; once it is known that torch does, this is to be asked again. Raises InsufficientMemory
    with both numbers, DeviceError for a dtype that the device does not know.
    """
    stored = DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch."))
    chosen = (device.native_dtype if native else device.choose_dtype)(dtype, stored)
    packed = device.weight_size(chosen) if native else chosen.itemsize
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    needed = size if stored is None else _needed(size // stored.itemsize, config, chosen, packed)
    free = device.memory().free
    if needed > free:
        raise InsufficientMemory(
            f"the model's weights take {needed / _GIB:.2f} GiB in {str(chosen).removeprefix('torch.')} and "
            f"{free / _GIB:.2f} GiB of the device's memory are free: choose a smaller model or dtype"
        )


def _needed(numbers: int, config: Mapping[str, Any], chosen: torch.dtype, packed: float) -> int:
    """Bytes of so many weights of `packed` each. The embedding is kept as it is computed with, beside a head
    that is not."""
    rows, width = config.get("vocab_size"), config.get("hidden_size")
    embedding = min(rows * width, numbers) if isinstance(rows, int) and isinstance(width, int) else 0
    if packed == chosen.itemsize:
        return numbers * chosen.itemsize
    return int(embedding * chosen.itemsize + numbers * packed)
