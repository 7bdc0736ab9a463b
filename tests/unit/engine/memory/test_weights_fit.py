"""What weights need is known before they are read: as they are kept, packed or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.engine.device import MemoryFigures
from services.engine.device.cpu import CpuDevice, CpuSettings, KernelChoice, Quantization
from services.engine.device.cpu import device as cpu_device
from services.engine.device.cpu.native import BuildError
from services.engine.memory import InsufficientMemory
from services.engine.model import read_config
from services.engine.model.hf_config import check_weights_fit
from services.engine.model.open_model import open_model
from tests.support.torch_engine import save_tiny_model

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
    device = CpuDevice(1, settings=CpuSettings(KernelChoice.AUTO, quantization))
    free = int(needed * GIB)
    for more in (0, -(2**20)):
        monkeypatch.setattr(device.memory, "figures", lambda more=more: MemoryFigures(16 * GIB, free + more))
        if not more:
            check_weights_fit(tmp_path, CONFIG, dtype, device)
            continue
        with pytest.raises(InsufficientMemory, match=rf"weights take {needed:.2f} GiB in {dtype}"):
            check_weights_fit(tmp_path, CONFIG, dtype, device)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of brain floats."""
    whole, directory = (tmp_path_factory.mktemp(name) for name in ("float32", "bfloat16"))
    model: Any = AutoModelForCausalLM.from_pretrained(save_tiny_model("llama", whole), dtype=torch.bfloat16)
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("backend", ["auto", "transformers"])
def test_what_torch_turns_out_to_keep_is_compared_too(
    backend: str, half: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a compiler, or our decoder, on a CPU where float32 is the faster."""

    def refuse(**options: Any) -> Any:
        raise BuildError("no C++ compiler is here")

    monkeypatch.setattr(cpu_device, "open_library", refuse)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    device = CpuDevice(1, settings=CpuSettings(KernelChoice.AUTO))
    size = sum(file.stat().st_size for file in half.glob("*.safetensors"))
    free = size * 3 // 2
    monkeypatch.setattr(device.memory, "figures", lambda: MemoryFigures(16 * GIB, free))
    # It would fit if the native kernels computed it.
    check_weights_fit(half, read_config(half), "auto", device)
    with pytest.raises(InsufficientMemory, match=r"weights take 0\.00 GiB in float32 and"):
        open_model(half, device, backend=backend)
    free = size * 2
    assert open_model(half, device, backend=backend).dtype is torch.float32
