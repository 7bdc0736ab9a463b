"""Embeddings, classes and raw answers of a chat, as vLLM has them."""

from __future__ import annotations

from typing import Any

from gateway.schemas.chat_input import ChatInputFields
from gateway.schemas.ignored import CHAT_EMBEDDING_FIELDS, tree_of
from gateway.schemas.limits import RequestLimits
from gateway.schemas.pooling import (
    ClassifyRequest,
    EmbeddingFields,
    EmbeddingRequest,
    PooledFields,
    PoolingFields,
    PoolingRequest,
)


def _unsupported(of_texts: type[PooledFields]) -> dict[str, Any]:
    """What such a request of texts refuses, but for what belongs to chats; and texts."""
    kept = {
        name: neutral
        for name, neutral in of_texts.unsupported.items()
        if name not in ChatInputFields.model_fields
    }
    return {**kept, "input": ()}


class ChatDocument(PooledFields, ChatInputFields):
    """A chat that is one document."""

    ignored = tree_of(CHAT_EMBEDDING_FIELDS)

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        self.check_chat_input()
        self.check_tools(limits)


class ChatEmbeddingRequest(EmbeddingFields, ChatDocument):
    """A chat to turn into one vector."""

    unsupported = _unsupported(EmbeddingRequest)


class ChatClassifyRequest(ChatDocument):
    """A chat to classify."""

    unsupported = _unsupported(ClassifyRequest)


class ChatPoolingRequest(PoolingFields, ChatDocument):
    """A chat to run through a model that does not generate."""

    unsupported = _unsupported(PoolingRequest)
