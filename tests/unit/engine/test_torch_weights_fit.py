"""What weights need is known before they are read: as they are kept, packed or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.engine.core.weights import check_weights_fit
from services.engine.device import CpuDevice, CpuSettings, Kernels, MemoryFigures, Quantization
from services.engine.memory import InsufficientMemory

GIB = 2**30
# 10 GiB of brain floats, of which the embedding has 1.
CONFIG = {"dtype": "bfloat16", "vocab_size": 2**18, "hidden_size": 2**11}


@pytest.mark.parametrize(
    ("quantization", "dtype", "needed"),
    [
        (None, "bfloat16", 10.0),
        (None, "float32", 20.0),
        (Quantization.INT8, "bfloat16", 6.0),
        (Quantization.INT8, "float32", 7.0),
        (Quantization.INT4, "bfloat16", 4.125),
    ],
)
def test_weights_are_compared_as_they_are_kept(
    quantization: Quantization | None,
    dtype: str,
    needed: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(10 * GIB)
    device = CpuDevice(1, settings=CpuSettings(Kernels.AUTO, quantization))
    free = int(needed * GIB)
    for more in (0, -(2**20)):
        monkeypatch.setattr(device, "memory", lambda more=more: MemoryFigures(16 * GIB, free + more))
        if not more:
            check_weights_fit(tmp_path, CONFIG, dtype, device)
            continue
        with pytest.raises(InsufficientMemory, match=rf"weights take {needed:.2f} GiB in {dtype}"):
            check_weights_fit(tmp_path, CONFIG, dtype, device)
