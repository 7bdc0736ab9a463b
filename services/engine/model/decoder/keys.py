"""Judges a checkpoint's config key by key: what nobody here understands must not change the computation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from services.engine.model.decoder.errors import UnsupportedByDecoder
from services.engine.model.decoder.families import Family

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
    """Compares config.json with what the family understands. Raises UnsupportedByDecoder naming a key."""
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
