"""The HTTP routes, one file each."""

from __future__ import annotations

from gateway.routes import (
    chat_completions,
    completions,
    health,
    metrics,
    models,
    openapi,
    responses,
    sagemaker,
    tokenize,
)

__all__ = [
    "chat_completions",
    "completions",
    "health",
    "metrics",
    "models",
    "openapi",
    "responses",
    "sagemaker",
    "tokenize",
]
