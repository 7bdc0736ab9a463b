"""Embeddings and scores: encoders and decoders that give one vector, or one number, for each document."""

from __future__ import annotations

from services.engine.model.pooling.embedder import Embedder, EmbedError, open_embedder
from services.engine.model.pooling.pooler import (
    Dimensions,
    EmbedShapes,
    Pooling,
    PoolingSettings,
    read_dimensions,
    read_pooling,
)

__all__ = [
    "Dimensions",
    "EmbedError",
    "EmbedShapes",
    "Embedder",
    "Pooling",
    "PoolingSettings",
    "open_embedder",
    "read_dimensions",
    "read_pooling",
]
