"""What each family's config may say beyond the common part, and what a family does without saying it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any


class Windows(Enum):
    """Which layers look back no further than `sliding_window`."""

    NONE = "none"
    ALL = "all"
    BY_LAYER_TYPE = "by layer type"


@dataclass(frozen=True, slots=True)
class Family:
    """One model_type.

    keys: config keys that are read beside the common ones, by us or by transformers' config class. only: keys
    that are known with one value alone. flags: fields of DecoderSpec that follow from the family itself.
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
