"""Read a GGUF file's header to its end, and its metadata as a config.json. Imports no torch.

The file: "GGUF", a version, how many tensors and how many pairs of metadata, these pairs, a description of
each tensor. A text or a list is its length and its content. The reader of the package gguf keeps each token
of the vocabulary as an array, which takes seconds; here such lists are stepped over.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from services.engine.model.checks import ModelError, shown, why_not

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# Formats of struct by the types of values that have a size of their own.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MOST_DIMENSIONS = 4
_MOST_NESTED = 2
# A name and a type are there at least of each pair; of each tensor also its dimensions and its place.
_LEAST_PAIR, _LEAST_TENSOR = 13, 24
# Names of metadata behind the architecture's, and the fields of a config that they become.
_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "vocab_size": "vocab_size",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "rope.scaling.factor": "factor",
}


# Lists of numbers that are kept, one for each layer; of longer ones the length alone.
_KEPT_ITEMS = 4096


class _Damaged(Exception):
    """A defect of the file, as the end of a sentence."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A file's metadata by key, and the names of its tensors. Of a list of texts, or a long one, the metadata
    have the length."""

    values: Mapping[str, Any]
    tensors: frozenset[str]


def read_gguf_header(file: Path) -> GgufHeader:
    """Read the header of a GGUF file and check it. Raises ModelError, one line."""
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Walk(data).read()
    except (_Damaged, ValueError) as error:
        # An empty file cannot be mapped: ValueError.
        why = error if isinstance(error, _Damaged) else "it is empty"
        raise ModelError(f"GGUF file {file} cannot be read: {why}") from None
    except OSError as error:
        raise ModelError(f"GGUF file {file} cannot be read: {error.strerror}") from None


def check_gguf(file: Path) -> None:
    """Check that a GGUF file can be converted, as far as its header tells. Raises ModelError, one line."""
    header = read_gguf_header(file)
    for key, value in header.values.items():
        if key.endswith(".block_count") and isinstance(value, int) and value > len(header.tensors):
            raise ModelError(
                f"GGUF file {file} cannot be converted: {key} is {value}, and it has {len(header.tensors)} "
                "tensors in all"
            )


class _Walk:
    """A walk through a header; `_at` is the place of the next byte."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def read(self) -> GgufHeader:
        if self._data[:4] != b"GGUF":
            raise _Damaged("it does not begin with GGUF")
        self._at = 4
        version = self._number("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(self._data[4:8], "big")
            kind = "big-endian" if swapped in _VERSIONS else f"of version {version}"
            raise _Damaged(f"it is {kind}; versions 2 and 3 can be read, little-endian")
        tensors = self._count("tensors", _LEAST_TENSOR)
        pairs = self._count("pairs of metadata", _LEAST_PAIR)
        values = dict(self._pair() for _ in range(pairs))
        return GgufHeader(values, frozenset(self._tensor() for _ in range(tensors)))

    def _pair(self) -> tuple[str, object]:
        key = self._text("the name of a value")
        value = self._value(self._whole("I"), key)
        name = key.partition(".")[2]
        field = _FIELDS.get(name, "")
        if field and (wrong := why_not(field, value)) is not None:
            raise _Damaged(f"{key} is {wrong}")
        return key, value

    def _value(self, kind: int, key: str, depth: int = 0) -> object:
        """A number, a text or a list of numbers; the length of a list of texts or of many numbers."""
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            start = self._at + struct.calcsize("<Q")
            self._skip(self._length(key), key)
            # Lists hold tokens and merges: reading them takes seconds, and no caller uses them.
            return None if depth else self._data[start : self._at].decode("utf-8", "replace")
        if kind != _ARRAY or depth >= _MOST_NESTED:
            raise _Damaged(f"{shown(key)} has a value of the unknown type {kind}")
        inner, count = self._whole("I"), self._whole("Q")
        if inner in _SCALARS:
            size = struct.calcsize("<" + _SCALARS[inner])
            start = self._at
            self._skip(count * size, key)
            if count > _KEPT_ITEMS:
                return count
            return list(struct.unpack_from(f"<{count}{_SCALARS[inner]}", self._data, start))
        if count > len(self._data) - self._at:
            raise _Damaged(f"{shown(key)} has {count} values, more than the file has bytes")
        for _ in range(count):
            self._value(inner, key, depth + 1)
        return count

    def _tensor(self) -> str:
        name = self._text("the name of a tensor")
        dimensions = self._whole("I")
        if dimensions > _MOST_DIMENSIONS:
            raise _Damaged(f"tensor {shown(name)} has {dimensions} dimensions")
        for _ in range(dimensions):
            if self._number("Q") >= 1 << 40:
                raise _Damaged(f"tensor {shown(name)} is larger than any")
        self._number("I")
        if self._number("Q") > len(self._data):
            raise _Damaged(f"tensor {shown(name)} begins behind the end of the file: it is cut short")
        return name

    def _count(self, of: str, least: int) -> int:
        count = self._whole("Q")
        if count * least > len(self._data):
            raise _Damaged(f"it names {count} {of}, more than a file of {len(self._data)} bytes can hold")
        return count

    def _length(self, of: str) -> int:
        length = self._whole("Q")
        if length > len(self._data) - self._at:
            raise _Damaged(f"{shown(of)} is {length} bytes long, more than the file has: it is damaged")
        return length

    def _text(self, of: str) -> str:
        length = self._length(of)
        start = self._at
        self._skip(length, of)
        try:
            return self._data[start : self._at].decode()
        except UnicodeDecodeError:
            raise _Damaged(f"{of} is no text: it is damaged") from None

    def _skip(self, size: int, of: str) -> None:
        if size > len(self._data) - self._at:
            raise _Damaged(f"it is cut short in {shown(of)}")
        self._at += size

    def _whole(self, kind: str) -> int:
        return int(self._number(kind))

    def _number(self, kind: str) -> int | float:
        size = struct.calcsize("<" + kind)
        start = self._at
        self._skip(size, "a number")
        number: int | float = struct.unpack_from("<" + kind, self._data, start)[0]
        return number


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
