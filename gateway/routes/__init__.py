"""The HTTP routes, one file each."""

from __future__ import annotations

from gateway.routes import (
    batches,
    chat_completions,
    completions,
    embeddings,
    files,
    health,
    home,
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
    "batches",
    "chat_completions",
    "completions",
    "embeddings",
    "files",
    "health",
    "home",
    "metrics",
    "models",
    "openapi",
    "rerank",
    "responses",
    "sagemaker",
    "score",
    "tokenize",
]
