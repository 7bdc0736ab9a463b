"""The HTTP routes, one file each."""

from __future__ import annotations

from gateway.routes import (
    chat_completions,
    completions,
    embeddings,
    health,
    metrics,
    models,
    openapi,
    rerank,
    responses,
    sagemaker,
    score,
    tokenize,
)

__all__ = [
    "chat_completions",
    "completions",
    "embeddings",
    "health",
    "metrics",
    "models",
    "openapi",
    "rerank",
    "responses",
    "sagemaker",
    "score",
    "tokenize",
]
