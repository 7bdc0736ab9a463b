"""Our loader: tensors reach their places in fused parameters; a checkpoint that does not fit is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.engine.device.cpu import device
from services.engine.device.cpu.native import BuildError
from services.engine.model import ModelError
from services.engine.model.loading import Checkpoint
from tests.support.decoder_models import altered, open_decoder, prompt_logits, save_family

Tensors = dict[str, torch.Tensor]
PROMPT = list(range(3, 40))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("mixtral", tmp_path_factory.mktemp("mixtral"))


def tensors_of(directory: Path) -> Tensors:
    tensors: Tensors = {}
    for path in directory.glob("*.safetensors"):
        tensors.update(load_file(path))
    return tensors


def rewritten(source: Path, target: Path, change: Callable[[Tensors], object], **config: Any) -> Path:
    """A single-file copy of a checkpoint with other tensors, or another config."""
    tensors = tensors_of(source)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    values = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**values, **config}))
    return target


def test_a_layer_holds_what_the_files_hold(llama: Path) -> None:
    """Sum and largest magnitude of every fused parameter of one layer, against its tensors on disk."""
    layer = open_decoder(llama).decoder.layers[1]
    files = tensors_of(llama)
    pieces = {
        "attention.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "attention.output": ["self_attn.o_proj"],
        "mlp.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "mlp.down": ["mlp.down_proj"],
    }
    for name, sources in pieces.items():
        for kind in ("weight", "bias"):
            got = layer.get_parameter(f"{name}.{kind}")
            expected = [files[f"model.layers.1.{source}.{kind}"] for source in sources]
            assert float(got.double().sum()) == pytest.approx(
                float(sum(tensor.double().sum() for tensor in expected)), rel=1e-12
            )
            assert float(got.abs().max()) == max(float(tensor.abs().max()) for tensor in expected)


def test_one_file_is_as_good_as_shards(llama: Path, tmp_path: Path) -> None:
    single = rewritten(llama, tmp_path, lambda tensors: None)
    assert torch.equal(
        prompt_logits(open_decoder(single), PROMPT), prompt_logits(open_decoder(llama), PROMPT)
    )


def test_stacked_experts_are_as_good_as_single_ones(mixtral: Path, tmp_path: Path) -> None:
    def stack(tensors: Tensors) -> None:
        for layer in range(3):
            old = f"model.layers.{layer}.block_sparse_moe"
            w1, w2, w3 = (
                torch.stack([tensors.pop(f"{old}.experts.{expert}.{name}.weight") for expert in range(5)])
                for name in ("w1", "w2", "w3")
            )
            tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.cat((w1, w3), dim=1)
            tensors[f"model.layers.{layer}.mlp.experts.down_proj"] = w2
            tensors[f"model.layers.{layer}.mlp.gate.weight"] = tensors.pop(f"{old}.gate.weight")

    stacked = rewritten(mixtral, tmp_path, stack)
    assert torch.equal(
        prompt_logits(open_decoder(stacked), PROMPT), prompt_logits(open_decoder(mixtral), PROMPT)
    )


def test_weights_are_cast_as_they_are_read(llama: Path) -> None:
    wide, narrow = open_decoder(llama), open_decoder(llama, "bfloat16")
    assert narrow.weight_bytes() * 2 == wide.weight_bytes()
    weight = narrow.decoder.layers[0].get_parameter("mlp.down.weight")
    assert torch.equal(weight, wide.decoder.layers[0].get_parameter("mlp.down.weight").bfloat16())


FAULTS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (
        lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"),
        r"parameters without weights: layers\.1\.attention\.qkv\.weight \(k\)",
    ),
    "two missing": (
        lambda tensors: [tensors.pop(f"model.layers.{layer}.mlp.up_proj.bias") for layer in (0, 2)],
        r"parameters without weights: layers\.0\.mlp\.gate_up\.bias \(up\) and 1 more",
    ),
    "unexpected": (
        lambda tensors: tensors.update({"model.layers.0.self_attn.rank.weight": torch.zeros(2)}),
        r"tensors without a place: model\.layers\.0\.self_attn\.rank\.weight",
    ),
    "a layer too many": (
        lambda tensors: tensors.update({"model.layers.3.input_layernorm.weight": torch.zeros(48)}),
        r"tensors without a place: model\.layers\.3\.input_layernorm\.weight",
    ),
    "place taken": (
        lambda tensors: tensors.update({"model.layers.0.mlp.gate_up_proj.weight": torch.zeros(128, 48)}),
        r"tensors for a place that is taken: ",
    ),
    "wrong shape": (
        lambda tensors: tensors.update({"model.norm.weight": torch.zeros(47)}),
        r"tensor model\.norm\.weight of model .* has the shape \(47,\); its config asks for \(48,\)",
    ),
    "integers": (
        lambda tensors: tensors.update({"model.norm.weight": torch.zeros(48, dtype=torch.int8)}),
        r"tensor model\.norm\.weight of .* is of type I8: quantized weights are not supported",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_that_does_not_fit_is_refused(fault: str, llama: Path, tmp_path: Path) -> None:
    change, message = FAULTS[fault]
    with pytest.raises(ModelError, match=message) as refusal:
        open_decoder(rewritten(llama, tmp_path, change))
    assert "\n" not in str(refusal.value)


def test_old_tensors_that_say_nothing_new_are_passed_over(llama: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    old = rewritten(llama, tmp_path, lambda tensors: tensors.update({name: torch.zeros(8)}))
    assert torch.equal(prompt_logits(open_decoder(old), PROMPT), prompt_logits(open_decoder(llama), PROMPT))


def test_a_tensor_in_two_shards_is_refused(llama: Path, tmp_path: Path) -> None:
    for path in llama.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    shards = sorted(tmp_path.glob("*.safetensors"))
    first, second = load_file(shards[0]), load_file(shards[1])
    name = sorted(first)[0]
    save_file({**second, name: first[name]}, shards[1])
    with pytest.raises(ModelError, match=f"has {name} and 0 more tensors twice"):
        open_decoder(tmp_path)


def test_shards_are_plain_files_of_the_directory(llama: Path, tmp_path: Path) -> None:
    """An index that points out of the directory is not followed."""
    inside = tmp_path / "inside"
    inside.mkdir()
    save_file({"model.norm.weight": torch.zeros(48)}, tmp_path / "secret.safetensors")
    index = {"weight_map": {"model.norm.weight": "../secret.safetensors"}}
    (inside / "model.safetensors.index.json").write_text(json.dumps(index))
    (inside / "config.json").write_text((llama / "config.json").read_text())
    with pytest.raises(ModelError, match=r"has no secret\.safetensors"):
        Checkpoint(inside)


def test_a_tied_config_with_a_head_of_its_own_keeps_the_head(llama: Path, tmp_path: Path) -> None:
    """As transformers decides: tensors that differ are not tied, whatever the config says."""
    untied = rewritten(llama, tmp_path, lambda tensors: None, tie_word_embeddings=True)
    model = open_decoder(untied)
    assert not model.decoder.spec.tied
    assert torch.equal(prompt_logits(model, PROMPT), prompt_logits(open_decoder(llama), PROMPT))


def test_a_head_equal_to_the_embedding_is_tied(llama: Path, tmp_path: Path) -> None:
    def share(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    model = open_decoder(rewritten(llama, tmp_path, share, tie_word_embeddings=True))
    assert model.decoder.spec.tied
    untied = altered(model, lambda spec: spec)
    assert model.weight_bytes() == untied.weight_bytes()


def halve(tensors: Tensors) -> None:
    tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})


def test_auto_is_bfloat16_where_native_kernels_compute(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = rewritten(llama, tmp_path, halve, dtype="bfloat16")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert open_decoder(directory, "auto", kernels="native").dtype is torch.bfloat16
    assert open_decoder(directory, "auto", kernels="torch").dtype is torch.float32
    assert open_decoder(llama, "auto", kernels="native").dtype is torch.float32

    def refuse(**options: Any) -> Any:
        raise BuildError("no C++ compiler is here")

    # Known only once the device was asked: what was made for it is made anew.
    monkeypatch.setattr(device, "open_library", refuse)
    model = open_decoder(directory, "auto", kernels="auto")
    assert model.dtype is torch.float32
    expected = prompt_logits(open_decoder(directory, "float32"), PROMPT)
    assert torch.equal(prompt_logits(model, PROMPT), expected)
