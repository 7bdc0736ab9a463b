"""A GGUF file's metadata as a config.json, without its weights. Imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from services.engine.model.gguf_file import read_gguf_header

# llama.cpp's names of families that transformers calls otherwise.
_FAMILIES: Final = {
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gpt-oss": "gpt_oss",
    "gemma3": "gemma3_text",
    "command-r": "cohere",
    "phi2": "phi",
    "gptneox": "gpt_neox",
    "deepseek2": "deepseek_v3",
}
_SIZES: Final = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "vocab_size": "vocab_size",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "first_k_dense_replace": "leading_dense_block_count",
    "ssm_state_size": "ssm.state_size",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
}


def read_gguf_config(file: Path) -> dict[str, Any]:
    """The sizes in a GGUF file's metadata, under the names of a config.json. Raises ModelError, one line."""
    header = read_gguf_header(file)
    values, tensors = header.values, header.tensors
    family = str(values.get("general.architecture", ""))
    config: dict[str, Any] = {
        "model_type": _FAMILIES.get(family, family),
        # Weights are converted to it.
        "dtype": "bfloat16",
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_output.bias" in tensors,
    }
    for name, key in _SIZES.items():
        value = values.get(f"{family}.{key}")
        if value is not None:
            config[name] = max(value) if isinstance(value, list) and value else value
    config.setdefault("vocab_size", values.get("tokenizer.ggml.tokens"))
    if "kv_lora_rank" in config:
        config |= _latent_dims(values, family)
    return config


def _latent_dims(values: Mapping[str, Any], family: str) -> dict[str, Any]:
    """A head's widths in attention over compressed keys and values; those with _mla are of expanded heads."""

    def width(key: str) -> int:
        found = values.get(f"{family}.attention.{key}_mla", values.get(f"{family}.attention.{key}"))
        return found if isinstance(found, int) else 0

    rotary = values.get(f"{family}.rope.dimension_count")
    rotary = rotary if isinstance(rotary, int) else 0
    return {
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": width("key_length") - rotary,
        "v_head_dim": width("value_length"),
    }
