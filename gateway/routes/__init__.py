"""The HTTP routes, one file each."""

from __future__ import annotations

from gateway.routes import (
    batches,
    chat_completions,
    classify,
    completions,
    embeddings,
    files,
    health,
    home,
    metrics,
    models,
    openapi,
    pooling,
    rerank,
    responses,
    sagemaker,
    score,
    tokenize,
)

__all__ = [
    "batches",
    "chat_completions",
    "classify",
    "completions",
    "embeddings",
    "files",
    "health",
    "home",
    "metrics",
    "models",
    "openapi",
    "pooling",
    "rerank",
    "responses",
    "sagemaker",
    "score",
    "tokenize",
]
