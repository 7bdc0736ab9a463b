"""Parameters counted from a config against those of transformers' own modules, on no device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from services.engine.memory import count_weights, read_shape

SMALL: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 500,
}
LATENT = {
    "num_key_value_heads": 6,
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
QWEN_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False, "attention_bias": True}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("qwen3", {"tie_word_embeddings": False, "head_dim": 32}),
        ("mistral", {}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("qwen3_moe", QWEN_EXPERTS),
        ("qwen3_moe", QWEN_EXPERTS | {"mlp_only_layers": [1]}),
        ("qwen2_moe", QWEN_EXPERTS | {"shared_expert_intermediate_size": 64, "head_dim": 16}),
        ("gemma2", {"head_dim": 16}),
        ("phi3", {"pad_token_id": 0}),
        ("deepseek_v3", LATENT),
    ],
)
def test_counts_are_those_of_transformers(kind: str, options: dict[str, Any]) -> None:
    config = AutoConfig.for_model(kind, **(SMALL | options))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    names = dict(model.named_parameters())
    biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith("correction_bias")}
    expected = sum(tensor.numel() for tensor in (*names.values(), *biases.values()))
    described = SMALL | options | {"model_type": kind}
    assert count_weights(read_shape(described, kind)).total == expected
