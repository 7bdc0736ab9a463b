"""Users' bug reports, section G: quantized weights that would load as plain numbers and speak gibberish."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.engine.core.errors import StartError
from services.engine.core.process import start_engine
from tests.support.torch_engine import save_tiny_model, tiny_options
from tests.support.torch_families import FAMILIES, save_family

INT8, FP8 = torch.int8, torch.float8_e4m3fn


def save(family: str, directory: Path) -> Path:
    """llama runs on our decoder, phi as transformers' module."""
    if family == "llama":
        return save_tiny_model("llama", directory)
    return save_family(FAMILIES[family], directory)


def quantize(directory: Path, dtype: torch.dtype, *, scales: bool) -> None:
    """Stores the weights of projections as `dtype`, and says nothing of it in the config."""
    for path in directory.glob("*.safetensors"):
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(path).items():
            if not name.endswith("proj.weight"):
                tensors[name] = tensor
                continue
            scale = tensor.abs().max() / 127
            whole = (tensor / scale).round()
            tensors[name] = whole.to(dtype)
            if scales:
                tensors[f"{name}_scale"] = scale.reshape(1)
        save_file(tensors, path, metadata={"format": "pt"})


def refusal(directory: Path) -> str:
    with pytest.raises(StartError) as raised:
        start_engine(tiny_options(directory), lambda activity, fraction: None)
    return str(raised.value)


@pytest.mark.parametrize("family", ["llama", "phi"])
@pytest.mark.parametrize(("dtype", "scales"), [(INT8, True), (INT8, False), (FP8, True)])
def test_c69_quantized_weights_are_refused_whatever_the_config_says(
    family: str, dtype: torch.dtype, scales: bool, tmp_path: Path
) -> None:
    directory = save(family, tmp_path)
    quantize(directory, dtype, scales=scales)
    message = refusal(directory)
    assert "quantized weights are not supported yet" in message
    assert "proj.weight" in message


@pytest.mark.parametrize("family", ["llama", "phi"])
@pytest.mark.parametrize(
    "scheme",
    [
        {"quantization_config": {"quant_method": "compressed-tensors", "format": "int-quantized"}},
        {"compression_config": {"quant_method": "compressed-tensors", "format": "int-quantized"}},
        {"quantization_config": {"quant_method": "nobody-knows"}},
    ],
    ids=["known", "older name", "unknown"],
)
def test_c69_a_scheme_in_the_config_is_refused(family: str, scheme: dict[str, Any], tmp_path: Path) -> None:
    directory = save(family, tmp_path)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **scheme}))
    assert "quantized weights, which are not supported yet" in refusal(directory)


def test_masks_and_positions_of_old_checkpoints_are_no_quantized_weights(tmp_path: Path) -> None:
    directory = save("llama", tmp_path)
    path = next(directory.glob("*.safetensors"))
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["transformer.h.0.attn.bias"] = torch.ones(8, 8, dtype=torch.uint8)
    save_file(tensors, path, metadata={"format": "pt"})
    start_engine(tiny_options(directory, model_backend="transformers"), lambda activity, fraction: None)
