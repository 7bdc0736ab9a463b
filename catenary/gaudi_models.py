"""Rules by model on Gaudi, as vLLM's plugin and its start scripts have them."""

from __future__ import annotations

# Families, by the beginning of config.json's model_type, whose scores are too large for the eight bits that
# bfloat16 has: the plugin computes their softmax in float32, without the kernel that rounds block maxima.
_FLOAT32_FAMILIES = ("qwen2",)
# Models for which start_gaudi_vllm_server.sh sets VLLM_FP32_SOFTMAX, by a part of their names.
_FLOAT32_NAMES = ("qwen2-7b", "qwen2.5-7b", "r1-distill-qwen-7b")


def needs_float32_scores(model_type: str) -> bool:
    """Whether attention of a model of this type has to compute its scores and their softmax in float32."""
    return model_type.startswith(_FLOAT32_FAMILIES)


def named_for_float32_scores(name: str) -> bool:
    """The same by a model's name, where its config.json has not been read."""
    return any(part in name.lower() for part in _FLOAT32_NAMES)
