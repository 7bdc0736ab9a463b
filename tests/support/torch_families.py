"""Tiny random models of the families that transformers' own modules serve, and what is special in each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 128

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 48,
    "n_inner": 64,
    "n_layer": 2,
    "n_head": 6,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}


@dataclass(frozen=True)
class Family:
    """A causal model class with its tiny config.

    off: what makes the family special, by name; either changes of the config or, as text, a pattern of
    parameters to set to zero, or to `-inf`-like with a leading minus. Each must change the logits.
    """

    name: str
    config: Mapping[str, Any]
    off: Mapping[str, Mapping[str, Any] | str]
    base: Mapping[str, Any] = field(default_factory=lambda: _COMMON)


FAMILIES: dict[str, Family] = {
    "phi": Family(
        "PhiForCausalLM",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        {
            "partial rotary": {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 1.0,
                }
            },
            "bias": r"(q|k|v)_proj\.bias|dense\.bias|lm_head\.bias",
        },
    ),
    "gpt_bigcode": Family(
        "GPTBigCodeForCausalLM",
        {"multi_query": True},
        {"learned positions": r"wpe\.weight", "bias": r"c_attn\.bias"},
        _GPT,
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        {"sliding_window": 11},
        {"window": {"sliding_window": None}, "bias": r"proj\.bias"},
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        {**_LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
        {
            "groups of experts": {"topk_method": "greedy"},
            "scale of experts": {"routed_scaling_factor": 1.0},
            "shared expert": r"shared_experts\.down_proj",
        },
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        {**_LATENT, "q_lora_rank": 24, "norm_topk_prob": True},
        {
            "bias of the choice": r"e_score_correction_bias",
            "normalised weights": {"norm_topk_prob": False},
            "interleaved rotary": {"rope_interleave": False},
        },
    ),
    "dbrx": Family(
        "DbrxForCausalLM",
        {
            "d_model": 48,
            "n_heads": 6,
            "n_layers": 2,
            "max_seq_len": 256,
            "attn_config": {"clip_qkv": 1.0, "kv_n_heads": 2, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 64, "hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        },
        {
            "clipping": {"attn_config": {"clip_qkv": 100.0, "kv_n_heads": 2, "rope_theta": 10000.0}},
            "second expert": {
                "ffn_config": {"ffn_hidden_size": 64, "hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 1}
            },
        },
        {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        {"sinks": r"-sinks", "window": {"sliding_window": 200}, "bias": r"proj_bias|proj\.bias|router\.bias"},
    ),
    "gpt2": Family(
        "GPT2LMHeadModel", {}, {"learned positions": r"wpe\.weight", "bias": r"c_attn\.bias"}, _GPT
    ),
    "opt": Family(
        "OPTForCausalLM",
        {"ffn_dim": 64, "word_embed_proj_dim": 24, "do_layer_norm_before": True},
        {"learned positions": r"embed_positions", "bias": r"fc1\.bias"},
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        {"head_dim": 16, "attention_bias": True},
        {"bias": r"proj\.bias", "norm after attention": r"post_self_attn_layernorm"},
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
        },
        {
            "bias of the choice": r"e_score_correction_bias",
            "query and key norms": {"use_qk_norm": False},
            "bias": r"proj\.bias",
        },
    ),
    "hunyuan_dense": Family(
        "HunYuanDenseV1ForCausalLM",
        {"head_dim": 8},
        {"norms of queries": r"query_layernorm"},
    ),
    "hunyuan_moe": Family(
        "HunYuanMoEV1ForCausalLM",
        {"head_dim": 8, "num_experts": 4, "moe_topk": [2, 2]},
        {
            "norms of keys": r"key_layernorm",
            "shared expert": r"shared_mlp\.down_proj",
            "second expert": {"moe_topk": [1, 1]},
        },
    ),
}


# Families that our decoder serves, by the other path.
DIRECT: dict[str, Family] = {
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {"head_dim": 16, "sliding_window": 9, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
        {
            "cap of scores": {"attn_logit_softcapping": None},
            "cap of logits": {"final_logit_softcapping": None},
            "window": {"sliding_window": 200},
        },
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "default", "rope_theta": 100000.0},
            },
        },
        {
            "window": {"sliding_window": 200},
            "rotary of its own": {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 100000.0},
                    "full_attention": {"rope_type": "default", "rope_theta": 100000.0},
                }
            },
        },
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 11},
        {"window": {"sliding_window": None}, "second expert": {"num_experts_per_tok": 1}},
    ),
    "granite": Family(
        "GraniteForCausalLM",
        {"logits_scaling": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
        {"scale of logits": {"logits_scaling": 1.0}, "scale of residuals": {"residual_multiplier": 1.0}},
    ),
}


def save_family(family: Family, directory: Path) -> Path:
    """Writes a random model in several files; its next-token scores are far apart: greedy has no ties."""
    model_class: Any = getattr(transformers, family.name)
    torch.manual_seed(7)
    model = model_class(model_class.config_class(**{**family.base, **family.config})).float()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("e_score_correction_bias") or tensor.requires_grad:
                tensor.copy_(torch.randn_like(tensor) * (0.3 if tensor.dim() > 1 else 1.0))
    model.save_pretrained(directory, max_shard_size="60KB")
    if len(list(directory.glob("*.safetensors"))) < 2:
        raise AssertionError("the weights are not sharded")
    return directory


def reference(family: Family, directory: Path, switched_off: str | None = None) -> Any:
    """The family's model by transformers alone, with one of its features switched off if asked to."""
    model_class: Any = getattr(transformers, family.name)
    off = family.off[switched_off] if switched_off else {}
    config = model_class.config_class.from_pretrained(directory)
    if not isinstance(off, str):
        for name, value in off.items():
            current = getattr(config, name)
            if isinstance(value, Mapping) and not isinstance(current, dict):
                value = type(current)(**value)
            setattr(config, name, value)
    model = model_class.from_pretrained(
        directory, config=config, dtype="float32", attn_implementation="eager"
    )
    if isinstance(off, str):
        pattern, value = re.compile(off.removeprefix("-")), -1e9 if off.startswith("-") else 0.0
        found = [t for n, t in (*model.named_parameters(), *model.named_buffers()) if pattern.search(n)]
        if not found:
            raise AssertionError(f"{family.name} has no {off}")
        with torch.no_grad():
            for tensor in found:
                tensor.fill_(value)
    return model.eval()
