"""Embeddings and scores: encoders and decoders that give one vector, or one number, for each document."""

from __future__ import annotations

from services.engine.model.pooling.dimensions import Dimensions, read_dimensions
from services.engine.model.pooling.embedder import Embedder, EmbedError, open_embedder
from services.engine.model.pooling.pooler import Pooler
from services.engine.model.pooling.settings import Pooling, PoolingSettings, read_pooling
from services.engine.model.pooling.shapes import EmbedBatch, EmbedShapes

__all__ = [
    "Dimensions",
    "EmbedBatch",
    "EmbedError",
    "EmbedShapes",
    "Embedder",
    "Pooler",
    "Pooling",
    "PoolingSettings",
    "open_embedder",
    "read_dimensions",
    "read_pooling",
]
