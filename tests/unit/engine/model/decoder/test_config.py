"""Which checkpoints our decoder takes, and what it says of those that it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from services.engine.device.cpu import CpuDevice
from services.engine.model import ModelError
from services.engine.model.decoder import UnsupportedByDecoder, spec_from_config
from services.engine.model.open_model import open_model
from tests.support.decoder_models import expected_logits, open_decoder, prompt_logits, reference, save_family

PROMPT = list(range(3, 60))


def spec(class_name: str, **values: Any) -> Any:
    config: Any = getattr(transformers, class_name)(**values)
    return spec_from_config(config, {**config.to_dict(), **values})


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("llama", tmp_path_factory.mktemp("llama"))


def with_config(source: Path, target: Path, **values: Any) -> Path:
    for path in source.iterdir():
        (target / path.name).symlink_to(path)
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").unlink()
    (target / "config.json").write_text(json.dumps({**config, **values}))
    return target


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("embedding_noise", 0.1, "embedding_noise = 0.1"),
        ("rope_interleaved", True, "rope_interleaved = True"),
        ("hidden_act", "relu", "hidden_act = relu"),
    ],
)
def test_a_key_that_is_not_known_is_named(
    key: str, value: Any, message: str, llama: Path, tmp_path: Path
) -> None:
    directory = with_config(llama, tmp_path, **{key: value})
    with pytest.raises(UnsupportedByDecoder, match=message) as refusal:
        open_model(directory, CpuDevice(1), max_model_len=256, backend="decoder")
    assert "set model-backend to transformers" in str(refusal.value)
    served = open_model(directory, CpuDevice(1), dtype="float32", max_model_len=256, backend="auto")
    assert served.backend == "transformers"


def test_the_operator_chooses(llama: Path) -> None:
    for backend, served in (("auto", "decoder"), ("decoder", "decoder"), ("transformers", "transformers")):
        assert open_model(llama, CpuDevice(1), dtype="float32", backend=backend).backend == served


def test_keys_that_change_nothing_are_passed_over(llama: Path, tmp_path: Path) -> None:
    directory = with_config(
        llama, tmp_path, rope_interleaved=False, use_cache=False, pretraining_tp=2, custom=None
    )
    assert torch.equal(
        prompt_logits(open_decoder(directory), PROMPT), prompt_logits(open_decoder(llama), PROMPT)
    )


def test_other_model_types_and_experts_that_do_not_align_are_not_taken() -> None:
    with pytest.raises(UnsupportedByDecoder, match=r"this model type \(model type gpt2\)"):
        spec("GPT2Config")
    with pytest.raises(UnsupportedByDecoder, match="not multiples of 8"):
        spec(
            "MixtralConfig",
            hidden_size=64,
            intermediate_size=36,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    with pytest.raises(UnsupportedByDecoder, match="use_bidirectional_attention = True"):
        spec("Gemma3TextConfig", use_bidirectional_attention=True)
    with pytest.raises(UnsupportedByDecoder, match="attn_logit_softcapping"):
        spec("Gemma3TextConfig", attn_logit_softcapping=30.0)


@pytest.mark.parametrize("wanted", [0, 9])
def test_more_experts_for_a_token_than_there_are_is_refused(wanted: int) -> None:
    with pytest.raises(ValueError, match=f"a token cannot have {wanted} of 8 experts"):
        spec("MixtralConfig", num_local_experts=8, num_experts_per_tok=wanted)


def test_a_longer_context_than_the_short_factors_serve_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="set max-model-len to 256 or less"):
        open_decoder(save_family("phi3", tmp_path), max_model_len=512)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 77.0},
        {"rope_type": "dynamic", "rope_theta": 77.0, "factor": 3.0},
        {"rope_type": "linear", "rope_theta": 77.0, "factor": 3.0},
        {
            "rope_type": "yarn",
            "rope_theta": 77.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16,
            "truncate": False,
        },
        {
            "rope_type": "longrope",
            "rope_theta": 77.0,
            "short_factor": [1.0 + index / 4 for index in range(8)],
            "long_factor": [2.0] * 8,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    ],
    ids=lambda rope: str(rope["rope_type"]),
)
def test_rotary_embeddings_equal_transformers(rope: dict[str, Any], tmp_path: Path) -> None:
    directory = save_family("llama", tmp_path, rope_parameters=rope)
    expected = expected_logits(reference("llama", directory), PROMPT)
    assert (prompt_logits(open_decoder(directory), PROMPT) - expected).abs().max() < 1e-4


def test_published_configs_of_the_families_are_known() -> None:
    """Keys as the checkpoints on the hub have them, older names included."""
    common = {"torch_dtype": "bfloat16", "transformers_version": "4.40.0", "use_cache": True}
    llama3 = spec(
        "LlamaConfig",
        **common,
        head_dim=128,
        rope_theta=500000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        pretraining_tp=1,
    )
    assert llama3.ropes[0].frequencies[-1] < 1 / 500000.0 ** (126 / 128) / 7
    mistral = spec("MistralConfig", **common, sliding_window=4096, rope_theta=10000.0)
    assert {layer.window for layer in mistral.layers} == {4096}
    qwen = spec(
        "Qwen2Config",
        **common,
        use_sliding_window=False,
        sliding_window=131072,
        max_window_layers=28,
        rope_theta=1e6,
    )
    assert {layer.window for layer in qwen.layers} == {None}
    moe = spec(
        "Qwen3MoeConfig",
        **common,
        max_window_layers=48,
        use_sliding_window=False,
        decoder_sparse_step=2,
        norm_topk_prob=True,
        router_aux_loss_coef=0.001,
    )
    assert [layer.experts for layer in moe.layers[:4]] == [False, True, False, True]
    gemma = spec("GemmaConfig", **common, hidden_act="gelu", hidden_activation=None)
    assert gemma.activation == "gelu_pytorch_tanh"
    gemma3 = spec(
        "Gemma3TextConfig",
        **common,
        sliding_window=1024,
        sliding_window_pattern=6,
        rope_theta=1e6,
        rope_local_base_freq=10000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    assert [layer.window for layer in gemma3.layers[4:6]] == [1024, None]
    assert len({gemma3.ropes[layer.rope].frequencies for layer in gemma3.layers}) == 2
