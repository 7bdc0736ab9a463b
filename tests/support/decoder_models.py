"""Tiny random checkpoints of the families that our decoder serves, their features live, saved in shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from services.engine.device.cpu import CpuDevice, CpuSettings, KernelChoice
from services.engine.model.decoder import Decoder, DecoderModel, DecoderSpec, RopeSpec
from services.engine.model.open_model import open_model
from tests.support.torch_engine import VOCAB, Output

BLOCK = 8
TOLERANCE = 1e-4

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

Change = Callable[[DecoderSpec], DecoderSpec]


def _without(**values: Any) -> Change:
    return lambda spec: replace(spec, **values)


def _unwindowed(spec: DecoderSpec) -> DecoderSpec:
    return replace(spec, layers=tuple(replace(plan, window=None) for plan in spec.layers))


def _windowed(spec: DecoderSpec) -> DecoderSpec:
    """Every layer windowed: shows that some are not."""
    window = max(plan.window or 0 for plan in spec.layers)
    return replace(spec, layers=tuple(replace(plan, window=window) for plan in spec.layers))


def _one_rope(spec: DecoderSpec) -> DecoderSpec:
    return replace(spec, ropes=(spec.ropes[0],) * len(spec.ropes))


def _plain_rope(theta: float) -> Change:
    def change(spec: DecoderSpec) -> DecoderSpec:
        exponents = [2 * index / spec.head_dim for index in range(spec.head_dim // 2)]
        plain = RopeSpec(tuple(theta**-exponent for exponent in exponents), 1.0)
        return replace(spec, ropes=(plain,) * len(spec.ropes))

    return change


def _unfactored_rope(spec: DecoderSpec) -> DecoderSpec:
    return replace(spec, ropes=tuple(replace(rope, factor=1.0) for rope in spec.ropes))


def _unnormalized(spec: DecoderSpec) -> DecoderSpec:
    if spec.experts is None:
        raise AssertionError("no experts")
    return replace(spec, experts=replace(spec.experts, normalize=False))


_BIASES = {"attention biases": _without(qkv_bias=False), "output bias": _without(output_bias=False)}
_GEMMA = {
    "unit offset": _without(unit_offset_norm=False),
    "embedding multiplier": _without(embedding_multiplier=1.0),
}


@dataclass(frozen=True, slots=True)
class TinyFamily:
    """A class of transformers, what its config says, and for each feature the spec that lacks it."""

    class_name: str
    config: dict[str, Any]
    without: dict[str, Change]
    # Where it is not the class's own.
    config_class: str | None = None


FAMILIES: dict[str, TinyFamily] = {
    "llama": TinyFamily(
        "LlamaForCausalLM",
        {
            "head_dim": 16,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 100.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        {**_BIASES, "mlp bias": _without(mlp_bias=False), "rope scaling": _plain_rope(100.0)},
    ),
    "internlm3": TinyFamily(
        "LlamaForCausalLM",
        {
            "head_dim": 16,
            "qkv_bias": True,
            "bias": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 6.0},
        },
        {**_BIASES, "mlp bias": _without(mlp_bias=False)},
        config_class="InternLM3Config",
    ),
    "qwen2": TinyFamily(
        "Qwen2ForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        {
            "bias": _without(qkv_bias=False),
            "window": _unwindowed,
            "first layers without": _windowed,
            "rope scaling": _plain_rope(1000.0),
            "rope factor": _unfactored_rope,
        },
    ),
    "qwen3": TinyFamily(
        "Qwen3ForCausalLM",
        {
            "head_dim": 16,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0},
        },
        {**_BIASES, "norm of queries and keys": _without(qk_norm=False), "rope": _plain_rope(1000.0)},
    ),
    "mistral": TinyFamily(
        "MistralForCausalLM", {"head_dim": 16, "sliding_window": 9}, {"window": _unwindowed}
    ),
    "mixtral": TinyFamily(
        "MixtralForCausalLM",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 9},
        {"window": _unwindowed, "normalized weights": _unnormalized},
    ),
    "qwen3_moe": TinyFamily(
        "Qwen3MoeForCausalLM",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 11,
        },
        {
            "norm of queries and keys": _without(qk_norm=False),
            "window": _unwindowed,
            "normalized weights": _unnormalized,
        },
    ),
    "phi3": TinyFamily(
        "Phi3ForCausalLM",
        {
            "sliding_window": 9,
            "max_position_embeddings": 512,
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.7],
                "long_factor": [2.0, 5.0],
                "original_max_position_embeddings": 256,
            },
        },
        {"window": _unwindowed, "rope factor": _unfactored_rope, "partial rotation": _plain_rope(100.0)},
    ),
    "granite": TinyFamily(
        "GraniteForCausalLM",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 1.7,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.3,
        },
        {
            **_BIASES,
            "attention multiplier": _without(scale=8**-0.5),
            "embedding multiplier": _without(embedding_multiplier=1.0),
            "residual multiplier": _without(residual_multiplier=1.0),
            "logits scaling": _without(logits_divisor=1.0),
        },
    ),
    "gemma": TinyFamily("GemmaForCausalLM", {"head_dim": 16, "tie_word_embeddings": True}, _GEMMA),
    "gemma2": TinyFamily(
        "Gemma2ForCausalLM",
        {
            "head_dim": 16,
            "tie_word_embeddings": True,
            "sliding_window": 9,
            "query_pre_attn_scalar": 7,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 5.0,
        },
        {
            **_GEMMA,
            "window": _unwindowed,
            "layers without": _windowed,
            "query scaling": _without(scale=16**-0.5),
            "attention cap": _without(attention_softcap=None),
            "final cap": _without(logits_softcap=None),
            "norms after": _without(sandwich_norms=False),
        },
    ),
    "gemma3_text": TinyFamily(
        "Gemma3ForCausalLM",
        {
            "head_dim": 16,
            "tie_word_embeddings": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
        {
            **_GEMMA,
            "window": _unwindowed,
            "layers without": _windowed,
            "query scaling": _without(scale=16**-0.5),
            "norm of queries and keys": _without(qk_norm=False),
            "norms after": _without(sandwich_norms=False),
            "bases": _one_rope,
        },
    ),
}


def save_family(name: str, directory: Path, **overrides: Any) -> Path:
    """Writes a random model whose next-token scores are far apart, in shards of a few tensors each."""
    family = FAMILIES[name]
    model_class: Any = getattr(transformers, family.class_name)
    config_class: Any = getattr(transformers, family.config_class or model_class.config_class.__name__)
    torch.manual_seed(11)
    config = config_class(**{**_SMALL, **family.config, **overrides})
    model = model_class(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.7))
    model.save_pretrained(directory, max_shard_size="40KB")
    return directory


def reference(name: str, directory: Path, dtype: str = "float32") -> Any:
    """transformers' own model."""
    family = FAMILIES[name]
    model_class: Any = getattr(transformers, family.class_name)
    config_class: Any = getattr(transformers, family.config_class or model_class.config_class.__name__)
    config = config_class.from_pretrained(directory)
    return model_class.from_pretrained(
        directory, config=config, dtype=dtype, attn_implementation="eager"
    ).eval()


def open_decoder(
    directory: Path, dtype: str = "float32", max_model_len: int | None = 256, kernels: str = "torch"
) -> DecoderModel:
    """The checkpoint on our decoder; its modules compute unless `kernels` says otherwise."""
    device = CpuDevice(1, settings=CpuSettings(KernelChoice(kernels)))
    model = open_model(directory, device, dtype=dtype, max_model_len=max_model_len, backend="decoder")
    if not isinstance(model, DecoderModel):
        raise AssertionError(f"served by {model.backend}")
    return model


def altered(model: DecoderModel, change: Change) -> DecoderModel:
    """The same weights under another spec."""
    decoder = Decoder(change(model.decoder.spec), model.device, model.dtype)
    decoder.load_state_dict(model.decoder.state_dict(), strict=False)
    return DecoderModel(decoder, model.device, model.dtype)


def prompt_logits(model: DecoderModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits of one prompt computed in one prefill, [T, vocab]."""
    count = len(token_ids)
    model.allocate_kv(-(-count // BLOCK), BLOCK)
    places = torch.arange(count)
    hidden = model.prefill(
        torch.tensor(token_ids),
        places,
        places,
        torch.zeros((1, 0), dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64),
    )
    return model.logits(hidden)


def expected_logits(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """The same by transformers."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[0]
    return logits


def assert_greedy(model: Any, prompt: list[int], output: Output) -> None:
    """If the reference's best token after every prefix is ours, its greedy decoding is ours."""
    scores = torch.log_softmax(expected_logits(model, prompt + output.token_ids).float(), -1)
    for position, token in enumerate(output.token_ids):
        row = scores[len(prompt) - 1 + position]
        if int(row.argmax()) != token:
            raise AssertionError(f"token {position} is {token}, not {int(row.argmax())}")
        if abs(output.logprobs[position] - float(row[token])) > TOLERANCE:
            raise AssertionError(f"log probability {position}: {output.logprobs[position]}, not {row[token]}")
