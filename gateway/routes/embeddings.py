"""`POST /v1/embeddings`."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from catenary.v1 import common_pb2
from gateway.errors import bad_request
from gateway.generation import to_chat_input
from gateway.http import Deferred
from gateway.openapi import ASKS, Routes, operation
from gateway.pooling import (
    Embedding,
    EmbeddingList,
    Pooled,
    PooledEndpoint,
    PoolingService,
    Work,
    unpack,
    usage_of,
    vector_width,
)
from gateway.schemas import (
    ChatEmbeddingRequest,
    EmbeddingFields,
    EmbeddingRequest,
    RequestLimits,
    parse_request,
)
from gateway.text import Model


class EmbeddingEndpoint(PooledEndpoint[EmbeddingFields]):
    """Vectors, in the order of the input; or one of a chat."""

    id_prefix = "embd-"
    tasks = (common_pb2.MODEL_TASK_EMBED,)

    def parse(self, body: dict[str, Any], limits: RequestLimits) -> EmbeddingFields:
        if body.get("messages") is None:
            return parse_request(EmbeddingRequest, body, limits)
        if body.get("input") is not None:
            raise bad_request("Only one of 'input' and 'messages' is allowed.", "messages")
        return parse_request(ChatEmbeddingRequest, body, limits)

    async def work(self, fields: EmbeddingFields, model: Model) -> Work:
        asked = Work(
            common_pb2.MODEL_TASK_EMBED,
            "input",
            dimensions=vector_width(fields.dimensions, model),
            truncate=fields.truncate_prompt_tokens,
        )
        if isinstance(fields, ChatEmbeddingRequest):
            if not model.traits.has_chat_template and fields.chat_template is None:
                raise bad_request(
                    "This model has no chat template: use 'input', or have the server started with one.",
                    "messages",
                    "unsupported_value",
                )
            # No answer is wanted: its turn is begun only where that is asked for.
            begins = {"add_generation_prompt": bool(fields.add_generation_prompt)}
            chat = to_chat_input(fields.model_copy(update=begins), model.traits)
            return replace(asked, param="messages", chat=chat)
        if not isinstance(fields, EmbeddingRequest):
            raise TypeError("a request of another route")
        return replace(
            asked,
            texts=[text for text in fields.input if isinstance(text, str)],
            ids=[ids for ids in fields.input if isinstance(ids, list)],
            add_special_tokens=fields.add_special_tokens is not False,
        )

    def write(self, fields: EmbeddingFields, pooled: Pooled) -> bytes:
        encoded = fields.encoding_format == "base64"
        data = [
            Embedding("embedding", index, b64encode(vector).decode() if encoded else unpack(vector))
            for index, vector in enumerate(pooled.vectors)
        ]
        answer = EmbeddingList("list", pooled.model.asked, data, usage_of(pooled.prompt_tokens))
        return msgspec.json.encode(answer)


def routes(service: PoolingService) -> Routes:
    """The route."""
    router = Routes()
    serve = partial(service.serve, EmbeddingEndpoint())

    @router.post(
        "/v1/embeddings",
        operation(
            "Turn texts into vectors", EmbeddingList, EmbeddingRequest, ChatEmbeddingRequest, fails=ASKS
        ),
    )
    async def embeddings() -> Response:
        return Deferred(serve)

    return router
