"""Run transformers' own modules with our paged attention."""

from __future__ import annotations

from services.engine.model.transformers_backend.loading import (
    load_model,
    load_model_config,
    load_module,
    model_class,
)
from services.engine.model.transformers_backend.modules import UnsupportedAttention

__all__ = [
    "UnsupportedAttention",
    "load_model",
    "load_model_config",
    "load_module",
    "model_class",
]
