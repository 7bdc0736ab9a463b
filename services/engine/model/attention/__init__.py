"""Paged attention: what a forward says about its batch, the caches, and attending over them."""

from __future__ import annotations

from services.engine.device import NO_FEATURES, AttentionFeatures
from services.engine.model.attention.attend import attend
from services.engine.model.attention.inputs import (
    DecodeInputs,
    PrefillInputs,
    Window,
    decode_biases,
    decode_distances,
    prefill_distances,
    prefill_masks,
)
from services.engine.model.attention.layers import LayerCache, LayerSpec

__all__ = [
    "NO_FEATURES",
    "AttentionFeatures",
    "DecodeInputs",
    "LayerCache",
    "LayerSpec",
    "PrefillInputs",
    "Window",
    "attend",
    "decode_biases",
    "decode_distances",
    "prefill_distances",
    "prefill_masks",
]
