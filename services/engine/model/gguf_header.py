"""A GGUF file's metadata as a config.json, without its weights. Imports neither torch nor numpy.

The reader of the package gguf keeps each token of the vocabulary as an array, which takes seconds; here lists
are stepped over.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

from services.engine.model.errors import ModelError

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
# By the number of a value's type in the file.
_SCALARS: Final = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
_MOST_BYTES: Final = 2**27
_MOST_ITEMS: Final = 2**24
# Lists of numbers that are kept: one for each layer.
_KEPT_ITEMS: Final = 4096
_TENSOR_TYPE_AND_OFFSET: Final = 12
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
    try:
        with file.open("rb") as stream:
            values, tensors = _read(stream)
    except (struct.error, UnicodeDecodeError, ValueError, OverflowError, RecursionError):
        raise ModelError(f"{file} is cut short or not a GGUF file of version 2 or 3") from None
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from None
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


def _read(stream: BinaryIO) -> tuple[dict[str, Any], set[str]]:
    """Values by key, where a long list is its length, and the names of the tensors. Raises ValueError."""
    magic = stream.read(4)
    version, tensors, pairs = struct.unpack("<IQQ", stream.read(20))
    if magic != _MAGIC or version not in _VERSIONS or max(tensors, pairs) > _MOST_ITEMS:
        raise ValueError("no GGUF file")
    values: dict[str, Any] = {}
    for _ in range(pairs):
        key = _text(stream)
        values[key] = _value(stream, _number(stream, "I"))
    names = set()
    for _ in range(tensors):
        names.add(_text(stream))
        stream.seek(8 * _number(stream, "I") + _TENSOR_TYPE_AND_OFFSET, 1)
    return values, names


def _value(stream: BinaryIO, kind: int) -> Any:
    if kind == _TEXT:
        return _text(stream)
    if kind in _SCALARS:
        return _number(stream, _SCALARS[kind])
    if kind != _LIST:
        raise ValueError("a value has an unknown type")
    inner, count = _number(stream, "I"), _number(stream, "Q")
    if count > _MOST_ITEMS:
        raise ValueError("a list is too long")
    if inner in _SCALARS and count <= _KEPT_ITEMS:
        return [_number(stream, _SCALARS[inner]) for _ in range(count)]
    if inner in _SCALARS:
        stream.seek(count * struct.calcsize(_SCALARS[inner]), 1)
    else:
        for _ in range(count):
            _value(stream, inner)
    return count


def _number(stream: BinaryIO, kind: str) -> Any:
    return struct.unpack(f"<{kind}", stream.read(struct.calcsize(f"<{kind}")))[0]


def _text(stream: BinaryIO) -> str:
    length = _number(stream, "Q")
    if length > _MOST_BYTES:
        raise ValueError("a text is too long")
    data = stream.read(length)
    if len(data) < length:
        raise ValueError("the file ends in a text")
    return data.decode("utf-8", "replace")
