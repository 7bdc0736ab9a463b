"""The config.json of Llama 3.1 8B, published."""

from __future__ import annotations

from typing import Any

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128_256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16",
}
