"""`POST /v1/embeddings` of a chat, as vLLM has it."""

from __future__ import annotations

from gateway.schemas.chat_input import ChatInputFields
from gateway.schemas.ignored import CHAT_EMBEDDING_FIELDS, tree_of
from gateway.schemas.limits import RequestLimits
from gateway.schemas.pooling import EmbeddingFields, EmbeddingRequest


class ChatEmbeddingRequest(EmbeddingFields, ChatInputFields):
    """A chat to turn into one vector."""

    unsupported = {
        name: neutral
        for name, neutral in EmbeddingRequest.unsupported.items()
        if name not in ChatInputFields.model_fields
    } | {"input": ()}

    ignored = tree_of(CHAT_EMBEDDING_FIELDS)

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        self.check_chat_input()
        self.check_tools(limits)
