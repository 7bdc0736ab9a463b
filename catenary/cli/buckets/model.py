"""What a model's config says about its sizes. No weights are read and no torch is imported."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a decoder. `max_position` is None if the config names no limit.

    `parameters` are those that one token passes, estimated from the shapes: of experts, the chosen ones.
    """

    name: str
    max_position: int | None
    kv_bytes_per_token: int
    parameters: int
    parameter_bytes: int
    attention_width: int
    vocab_size: int


def read_sizes(model: str) -> ModelSizes:
    """Sizes of a model by its alias, directory, file or hub id. Raises ValueError, one line."""
    from services.engine.model import ModelError, prepare_model, read_config, resolve_source

    try:
        source = resolve_source(model)
        directory = source.path
        if directory is None or not directory.is_dir():
            directory = prepare_model(model, progress=lambda line: print(line, file=sys.stderr))
        config = read_config(directory)
    except ModelError as error:
        raise ValueError(str(error)) from None
    text = config.get("text_config")
    return sizes_of(text if isinstance(text, dict) else config, source.name)


def sizes_of(config: dict[str, Any], name: str) -> ModelSizes:
    """Sizes from a parsed config. Raises ValueError for one that does not name them."""

    def number(*names: str, default: int | None = None) -> int:
        for key in names:
            value = config.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        if default is None:
            raise ValueError(f"the config of {name} names no {names[0]}")
        return default

    layers = number("num_hidden_layers", "n_layer")
    hidden = number("hidden_size", "n_embd")
    heads = number("num_attention_heads", "n_head")
    kv_heads = number("num_key_value_heads", default=1 if config.get("multi_query") else heads)
    head_dim = number("head_dim", default=hidden // heads)
    vocab = number("vocab_size")
    inner = number("moe_intermediate_size", "intermediate_size", "n_inner", default=4 * hidden)
    experts = number("num_experts_per_tok", default=1)
    kv_width = 2 * kv_heads * head_dim
    if "kv_lora_rank" in config:
        # Keys and values are kept expanded, for each head.
        rotary = number("qk_rope_head_dim")
        kv_width = heads * (number("qk_nope_head_dim") + rotary + number("v_head_dim"))
    width = 4 if str(config.get("dtype") or config.get("torch_dtype")).endswith("float32") else 2
    attention = 2 * hidden * heads * head_dim + hidden * 2 * kv_heads * head_dim
    position = number("max_position_embeddings", "n_positions", default=0)
    return ModelSizes(
        name=name,
        max_position=position or None,
        kv_bytes_per_token=layers * kv_width * width,
        parameters=layers * (attention + 3 * hidden * inner * experts) + vocab * hidden,
        parameter_bytes=width,
        attention_width=layers * heads * head_dim,
        vocab_size=vocab,
    )
