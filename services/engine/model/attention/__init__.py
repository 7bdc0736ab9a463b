"""Paged attention: what a forward says about its batch, and the caches its layers read and write."""

from __future__ import annotations

from services.engine.model.attention.inputs import (
    DecodeInputs,
    PrefillInputs,
    Window,
    decode_biases,
    prefill_masks,
)
from services.engine.model.attention.layers import LayerCache, LayerSpec

__all__ = [
    "DecodeInputs",
    "LayerCache",
    "LayerSpec",
    "PrefillInputs",
    "Window",
    "decode_biases",
    "prefill_masks",
]
