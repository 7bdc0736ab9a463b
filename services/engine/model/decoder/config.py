"""From a checkpoint's config to the spec of our decoder, judged key by key for its family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from services.engine.device import ACTIVATIONS
from services.engine.model.decoder.spec import (
    DecoderSpec,
    ExpertSpec,
    LayerPlan,
    RopeSpec,
    UnsupportedByDecoder,
)


class Windows(Enum):
    """Which layers look back no further than `sliding_window`."""

    NONE = "none"
    ALL = "all"
    BY_LAYER_TYPE = "by layer type"


@dataclass(frozen=True, slots=True)
class Family:
    """One model_type.

    keys: config keys that are read in addition to the common ones, by us or by transformers' config class.
    only: keys that are known with one value alone.
    flags: fields of DecoderSpec that follow from the family itself.
    """

    keys: frozenset[str] = frozenset()
    only: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)
    windows: Windows = Windows.NONE
    rope_by_layer_type: bool = False
    partial_rotary: bool = False
    activation: str = "hidden_act"


_QWEN_WINDOW = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})
_GEMMA = {"unit_offset_norm": True, "embedding_rounded": True}
_SANDWICHED = {**_GEMMA, "sandwich_norms": True}
_GEMMA_KEYS = frozenset(
    {
        "attention_bias",
        "hidden_activation",
        "query_pre_attn_scalar",
        "sliding_window",
        "layer_types",
        "final_logit_softcapping",
    }
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(keys=frozenset({"attention_bias", "mlp_bias"}), only={"rope_interleaved": False}),
        # llama with names of its own for the biases.
        "internlm3": Family(keys=frozenset({"attention_bias", "mlp_bias", "qkv_bias", "bias"})),
        "qwen2": Family(keys=_QWEN_WINDOW, windows=Windows.BY_LAYER_TYPE, flags={"qkv_bias": True}),
        "qwen3": Family(
            keys=_QWEN_WINDOW | {"attention_bias"},
            windows=Windows.BY_LAYER_TYPE,
            flags={"qk_norm": True},
        ),
        "qwen3_moe": Family(
            # transformers knows the windowed layers of this one by `use_sliding_window` alone.
            keys=_QWEN_WINDOW - {"layer_types"}
            | {
                "attention_bias",
                "decoder_sparse_step",
                "mlp_only_layers",
                "moe_intermediate_size",
                "norm_topk_prob",
                "num_experts",
                "num_experts_per_tok",
                "num_local_experts",
            },
            windows=Windows.ALL,
            flags={"qk_norm": True},
        ),
        "mistral": Family(keys=frozenset({"sliding_window"}), windows=Windows.ALL),
        "mixtral": Family(
            keys=frozenset({"sliding_window", "num_experts", "num_experts_per_tok", "num_local_experts"}),
            windows=Windows.ALL,
        ),
        "phi3": Family(
            keys=frozenset({"sliding_window", "original_max_position_embeddings", "partial_rotary_factor"}),
            windows=Windows.ALL,
            partial_rotary=True,
        ),
        "granite": Family(
            keys=frozenset(
                {
                    "attention_bias",
                    "attention_multiplier",
                    "embedding_multiplier",
                    "logits_scaling",
                    "mlp_bias",
                    "residual_multiplier",
                }
            )
        ),
        "gemma": Family(
            keys=frozenset({"attention_bias"}),
            only={"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False},
            flags=_GEMMA,
        ),
        "gemma2": Family(
            keys=_GEMMA_KEYS | {"attn_logit_softcapping"},
            only={"use_bidirectional_attention": False},
            flags=_SANDWICHED,
            windows=Windows.BY_LAYER_TYPE,
            activation="hidden_activation",
        ),
        "gemma3_text": Family(
            keys=_GEMMA_KEYS | {"rope_local_base_freq", "sliding_window_pattern"},
            only={"use_bidirectional_attention": False},
            flags={**_SANDWICHED, "qk_norm": True},
            windows=Windows.BY_LAYER_TYPE,
            rope_by_layer_type=True,
            activation="hidden_activation",
        ),
    }
)


# Read for every family, the older names of rope_parameters by transformers' config classes.
_COMMON = frozenset(
    {
        "head_dim",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "tie_word_embeddings",
        "vocab_size",
    }
)

# What a forward for serving computes does not depend on them, nor on notes and single tokens' ids.
_NEUTRAL = frozenset(
    {
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "auto_map",
        "cache_implementation",
        "do_sample",
        "dtype",
        "embd_pdrop",
        "finetuning_task",
        "id2label",
        "initializer_range",
        "is_llama_config",
        "label2id",
        "max_length",
        "max_sequence_length",
        "min_length",
        "model_type",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pretraining_tp",
        "problem_type",
        "repetition_penalty",
        "resid_pdrop",
        "return_dict",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "task_specific_params",
        "temperature",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)

_ROPE = frozenset(
    {
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "high_freq_factor",
        "long_factor",
        "low_freq_factor",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "rope_theta",
        "rope_type",
        "short_factor",
        "truncate",
        "type",
    }
)


def check_keys(raw: Mapping[str, Any], config: PreTrainedConfig, family: Family) -> None:
    """Compare config.json with what the family understands. Raises UnsupportedByDecoder naming a key."""
    defaults = type(config)()
    known = _COMMON | _NEUTRAL | family.keys
    for key, value in raw.items():
        if key in known or key.startswith("_") or key.endswith("_token_id"):
            continue
        if value is None or value == getattr(defaults, key, None):
            continue
        if key not in family.only or value != family.only[key]:
            raise UnsupportedByDecoder(config.model_type, f"{key} = {_shown(value)}")


def check_rope_keys(parameters: Mapping[str, Any], config: PreTrainedConfig, family: Family) -> None:
    """The same for the parameters of one rotary embedding."""
    for key, value in parameters.items():
        if key in _ROPE or value is None:
            continue
        if key == "partial_rotary_factor" and (family.partial_rotary or value == 1):
            continue
        raise UnsupportedByDecoder(config.model_type, f"{key} = {_shown(value)} of its rotary embedding")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_SLIDING = "sliding_attention"
# Grouped products want rows of whole 16 bytes.
_EXPERT_ALIGNMENT = 8


def spec_from_config(config: PreTrainedConfig, raw: Mapping[str, Any]) -> DecoderSpec:
    """Read the parsed config of a checkpoint; `raw` is its config.json.

    Raises UnsupportedByDecoder, naming what is not known, for other families and for keys and values whose
    effect is not implemented; ValueError and the like for values that make no model.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise UnsupportedByDecoder(config.model_type, "this model type")
    check_keys(raw, config, family)
    values: Any = config
    heads, kv_heads = values.num_attention_heads, values.num_key_value_heads
    if heads % kv_heads:
        raise ValueError(f"{heads} attention heads are no multiple of {kv_heads} key heads")
    head_dim = getattr(values, "head_dim", None) or values.hidden_size // heads
    rope_kinds = _rope_kinds(values, family)
    bias = bool(getattr(values, "attention_bias", False))
    mlp_bias = bool(getattr(values, "mlp_bias", False))
    gemma = bool(family.flags.get("embedding_rounded"))
    flags = {"qkv_bias": bias, "output_bias": bias, "mlp_bias": mlp_bias, **family.flags}
    return DecoderSpec(
        family=config.model_type,
        vocab_size=values.vocab_size,
        hidden_size=values.hidden_size,
        intermediate_size=values.intermediate_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=values.rms_norm_eps,
        activation=_activation(values, family),
        scale=_scale(values, head_dim),
        layers=tuple(_layer(values, family, rope_kinds, index) for index in range(values.num_hidden_layers)),
        ropes=tuple(_rope(values, family, kind) for kind in rope_kinds),
        tied=bool(values.tie_word_embeddings),
        attention_softcap=getattr(values, "attn_logit_softcapping", None),
        logits_softcap=getattr(values, "final_logit_softcapping", None),
        embedding_multiplier=values.hidden_size**0.5 if gemma else _number(values, "embedding_multiplier"),
        residual_multiplier=_number(values, "residual_multiplier"),
        logits_divisor=_number(values, "logits_scaling"),
        experts=_experts(values),
        **flags,
    )


def _number(values: Any, key: str) -> float:
    return float(getattr(values, key, 1.0))


def _activation(values: Any, family: Family) -> str:
    name = str(getattr(values, family.activation))
    if name not in ACTIVATIONS:
        raise UnsupportedByDecoder(values.model_type, f"{family.activation} = {name}")
    return name


def _scale(values: Any, head_dim: int) -> float:
    """Return the factor of scores before the softmax."""
    multiplier = getattr(values, "attention_multiplier", None)
    if multiplier is not None:
        return float(multiplier)
    scalar = getattr(values, "query_pre_attn_scalar", None)
    return float((scalar if scalar is not None else head_dim) ** -0.5)


def _experts(values: Any) -> ExpertSpec | None:
    count = getattr(values, "num_experts", 0)
    if not count:
        return None
    mixtral = values.model_type == "mixtral"
    size = values.intermediate_size if mixtral else values.moe_intermediate_size
    if size % _EXPERT_ALIGNMENT or values.hidden_size % _EXPERT_ALIGNMENT:
        raise UnsupportedByDecoder(
            values.model_type,
            f"experts of {values.hidden_size} x {size}, which are not multiples of {_EXPERT_ALIGNMENT},",
        )
    if not 1 <= values.num_experts_per_tok <= count:
        raise ValueError(f"a token cannot have {values.num_experts_per_tok} of {count} experts")
    return ExpertSpec(
        count=count,
        per_token=values.num_experts_per_tok,
        intermediate_size=size,
        normalize=mixtral or bool(values.norm_topk_prob),
        rounded=not mixtral,
    )


def _layer(values: Any, family: Family, rope_kinds: tuple[str | None, ...], index: int) -> LayerPlan:
    kind = values.layer_types[index] if family.windows is Windows.BY_LAYER_TYPE else None
    windowed = family.windows is Windows.ALL or kind == _SLIDING
    step = getattr(values, "decoder_sparse_step", 1)
    dense = index in (getattr(values, "mlp_only_layers", None) or ()) or (index + 1) % step != 0
    return LayerPlan(
        window=values.sliding_window if windowed else None,
        rope=rope_kinds.index(kind) if family.rope_by_layer_type else 0,
        experts=bool(getattr(values, "num_experts", 0)) and not dense,
    )


def _rope_kinds(values: Any, family: Family) -> tuple[str | None, ...]:
    """The layer types that have a rotary embedding of their own; (None,) if all layers share one."""
    return tuple(sorted(set(values.layer_types))) if family.rope_by_layer_type else (None,)


def _rope(values: Any, family: Family, layer_type: str | None) -> RopeSpec:
    """Return frequencies as transformers computes them, for the original context where that matters.

    `dynamic` is then the default one: it changes beyond max_position_embeddings, and no sequence gets there.
    """
    parameters = values.rope_parameters if layer_type is None else values.rope_parameters[layer_type]
    check_rope_keys(parameters, values, family)
    kind = parameters["rope_type"]
    if kind == "default":
        head_dim = getattr(values, "head_dim", None) or values.hidden_size // values.num_attention_heads
        rotated = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
        return RopeSpec(tuple((1.0 / parameters["rope_theta"] ** exponents).tolist()), 1.0)
    if kind not in ("linear", "dynamic", "yarn", "longrope", "llama3"):
        raise UnsupportedByDecoder(values.model_type, f"rope type {kind}")
    compute: Any = ROPE_INIT_FUNCTIONS[kind]
    frequencies, factor = compute(values, torch.device("cpu"), layer_type=layer_type)
    return RopeSpec(tuple(frequencies.tolist()), float(factor))
