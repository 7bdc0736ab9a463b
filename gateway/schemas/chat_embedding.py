"""`POST /v1/embeddings` of a chat, as vLLM has it."""

from __future__ import annotations

from typing import Any

from gateway.schemas.chat_input import ChatInputFields
from gateway.schemas.limits import RequestLimits
from gateway.schemas.pooling import EMBEDDING, EmbeddingFields

# Known parameters that cannot be honoured; see `unsupported`.
CHAT_EMBEDDING: dict[str, tuple[Any, ...]] = {
    name: neutral for name, neutral in EMBEDDING.items() if name not in ChatInputFields.model_fields
} | {"input": ()}


class ChatEmbeddingRequest(EmbeddingFields, ChatInputFields):
    """A chat to turn into one vector."""

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        self.check_chat_input()
        self.check_tools(limits)
