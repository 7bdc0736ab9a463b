"""Runs transformers' own modules with our paged attention."""

from __future__ import annotations

from services.engine.model.transformers_backend.architecture import first_line, load_config, model_class
from services.engine.model.transformers_backend.attention import UnsupportedAttention
from services.engine.model.transformers_backend.loading import (
    checkpoint_dtype,
    load_model,
    load_module,
)
from services.engine.model.transformers_backend.paged_model import TransformersModel

__all__ = [
    "TransformersModel",
    "UnsupportedAttention",
    "checkpoint_dtype",
    "first_line",
    "load_config",
    "load_model",
    "load_module",
    "model_class",
]
