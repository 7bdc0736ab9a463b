"""What is special about positions, experts and names of families, and which ones are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from services.engine.core.errors import StartError
from services.engine.core.process import start_engine
from services.engine.device.cpu import CpuDevice
from services.engine.model import ModelError
from services.engine.model.open_model import open_model
from services.engine.model.transformers_backend import load_model
from services.engine.model.transformers_backend.loading import DynamicShape, refuse_dynamic_shapes
from services.engine.model.transformers_backend.modules import grouped_product
from tests.support.torch_engine import LocalCore, save_tiny_model, tiny_options
from tests.support.torch_families import DIRECT, FAMILIES, reference, save_family

NO_CONTEXT = torch.zeros((1, 0), dtype=torch.int64)


def edit_config(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def logits_of_prompt(directory: Path, tokens: torch.Tensor, backend: str) -> torch.Tensor:
    model = open_model(directory, CpuDevice(1), dtype="float32", backend=backend)
    assert model.backend == backend
    model.allocate_kv(8, 8)
    positions = torch.arange(tokens.shape[0])
    return model.logits(model.prefill(tokens, positions, positions, NO_CONTEXT, torch.tensor([0])))


def test_internlm3_runs_as_llama_with_its_own_config(tmp_path: Path) -> None:
    """Its checkpoints name a class of their own repository, which is not needed; qkv_bias is their name."""
    make: Any = transformers.CONFIG_MAPPING["internlm3"]
    config = make(
        vocab_size=128,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        attention_bias=True,
        mlp_bias=True,
    )
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.data, std=0.3)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    saved |= {"qkv_bias": saved.pop("attention_bias", True), "bias": saved.pop("mlp_bias", True)}
    saved["architectures"] = ["InternLM3ForCausalLM"]
    saved["auto_map"] = {"AutoModelForCausalLM": "modeling_internlm3.InternLM3ForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    tokens = torch.arange(5, 45)
    with torch.inference_mode():
        expected = model.eval()(tokens.unsqueeze(0)).logits[0]
    for backend in ("decoder", "transformers"):
        found = logits_of_prompt(tmp_path, tokens, backend)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert open_model(tmp_path, CpuDevice(1), dtype="float32").backend == "decoder"
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data.zero_()
        layer.self_attn.q_proj.bias.data.zero_()
    with torch.inference_mode():
        assert not torch.allclose(model(tokens.unsqueeze(0)).logits[0], expected, atol=1e-2)


@pytest.mark.parametrize("name", ["gpt2", "opt", "dbrx"])
def test_sequences_run_to_the_last_position_and_not_beyond(name: str, tmp_path: Path) -> None:
    """Learned tables end there; OPT's begins with two rows that are no position."""
    family = FAMILIES[name]
    directory = save_family(family, tmp_path)
    core = LocalCore(tiny_options(directory, max_num_batched_tokens=128))
    assert core.engine.ready.model.max_model_len == 256
    prompt = [5 + index % 100 for index in range(250)]
    keys = [core.submit(prompt, max_tokens=30, top_logprobs=0), core.submit([7], max_tokens=3)]
    core.run()
    output, end = core.outputs[keys[0]], core.outputs[keys[0]].end
    assert end is not None
    assert end.prompt_tokens + end.completion_tokens == 256
    with torch.inference_mode():
        logits = reference(family, directory)(torch.tensor([prompt + output.token_ids])).logits[0, 249:-1]
    assert output.token_ids == logits.argmax(-1).tolist()
    with pytest.raises(StartError, match=r"max-model-len 300 exceeds the model's context of 256"):
        start_engine(tiny_options(directory, max_model_len=300), lambda activity, fraction: None)


@pytest.mark.parametrize(
    ("model_type", "architecture", "pointer"),
    [
        ("baichuan", "BaichuanForCausalLM", "converted to the llama format"),
        ("chatglm", "ChatGLMModel", "model types glm or glm4"),
        ("internlm2", "InternLM2ForCausalLM", "model type internlm3"),
        ("somebody", "SomebodysForCausalLM", "transformers' own format"),
    ],
)
def test_checkpoints_that_bring_their_code_are_refused_with_a_pointer(
    model_type: str, architecture: str, pointer: str, tmp_path: Path
) -> None:
    directory = save_tiny_model("llama", tmp_path)
    auto_map = {"AutoModelForCausalLM": f"modeling_{model_type}.{architecture}"}
    edit_config(directory, model_type=model_type, architectures=[architecture], auto_map=auto_map)
    with pytest.raises(ModelError, match="remote code is never run here") as raised:
        load_model(directory, CpuDevice(1), dtype="float32", max_model_len=None)
    assert architecture in str(raised.value)
    assert pointer in str(raised.value)


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [("bloom", "BloomForCausalLM"), ("falcon", "FalconForCausalLM"), ("mpt", "MptForCausalLM")],
)
def test_attention_that_is_not_handed_over_is_refused_by_name(
    model_type: str, architecture: str, tmp_path: Path
) -> None:
    directory = save_tiny_model("llama", tmp_path)
    edit_config(directory, model_type=model_type, architectures=[architecture])
    with pytest.raises(ModelError, match=f"architecture {architecture} is not supported: .* cannot be paged"):
        load_model(directory, CpuDevice(1), dtype="float32", max_model_len=None)


@pytest.mark.parametrize(
    "kind", ["dbrx", "gpt_oss", "glm4_moe", "deepseek_v2", "deepseek_v3", "hunyuan_moe", "mixtral"]
)
def test_experts_run_in_static_shapes(kind: str, tmp_path: Path) -> None:
    """A whole forward, past the check at the start, whatever the router chooses."""
    family = FAMILIES.get(kind) or DIRECT[kind]
    directory = save_family(family, tmp_path)
    model = load_model(directory, CpuDevice(1), dtype="float32", max_model_len=None)
    model.allocate_kv(8, 8)
    tokens = torch.randint(0, 128, (40,))
    positions = torch.arange(40)
    with refuse_dynamic_shapes():
        hidden = model.prefill(tokens, positions, positions, NO_CONTEXT, torch.tensor([0]))
    alone = reference(family, directory)
    with torch.inference_mode():
        torch.testing.assert_close(
            model.logits(hidden), alone(tokens.unsqueeze(0)).logits[0], atol=1e-4, rtol=0
        )
        if kind != "dbrx":
            alone.set_experts_implementation("eager")
        with pytest.raises(DynamicShape), refuse_dynamic_shapes():
            alone(tokens.unsqueeze(0))


def test_operations_whose_shape_depends_on_data_are_found() -> None:
    values = torch.tensor([1.0, -2.0, 3.0])
    listed = (
        lambda: values.nonzero(),
        lambda: torch.where(values > 0),
        lambda: values[values > 0],
        lambda: torch.masked_select(values, values > 0),
        lambda: torch.unique(values),
    )
    for operation in listed:
        with pytest.raises(DynamicShape), refuse_dynamic_shapes():
            operation()
    with refuse_dynamic_shapes():
        torch.where(values > 0, values, -values)
        values[torch.tensor([0, 2])].masked_fill_(torch.tensor([True, False]), 0.0)


@pytest.mark.parametrize(("inner", "outer"), [(48, 64), (47, 33)])
def test_the_grouped_product_takes_any_size(inner: int, outer: int) -> None:
    rows, weight = torch.randn(9, inner), torch.randn(4, inner, outer)
    groups = [0, 0, 1, 1, 1, 3, 3, 3, 3]
    ends = torch.tensor([2, 5, 5, 9], dtype=torch.int32)
    expected = torch.stack([row @ weight[group] for row, group in zip(rows, groups, strict=True)])
    torch.testing.assert_close(grouped_product(rows, weight, ends), expected, atol=1e-4, rtol=0)
