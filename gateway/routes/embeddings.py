"""`POST /v1/embeddings`."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from catenary.v1 import common_pb2
from gateway.http import Deferred
from gateway.openapi import ASKS, Routes, operation
from gateway.pooling import (
    Embedding,
    EmbeddingList,
    Pooled,
    PooledEndpoint,
    PoolingService,
    Work,
    document_work,
    numbers_of,
    read_documents,
    usage_of,
    vector_width,
)
from gateway.schemas import (
    ChatEmbeddingRequest,
    EmbeddingFields,
    EmbeddingRequest,
    RequestLimits,
)
from gateway.text import Model


class EmbeddingEndpoint(PooledEndpoint[EmbeddingFields]):
    """Vectors, in the order of the input; or one of a chat."""

    id_prefix = "embd-"
    tasks = (common_pb2.MODEL_TASK_EMBED,)

    def parse(self, body: dict[str, Any], limits: RequestLimits) -> EmbeddingFields:
        return read_documents(body, limits, EmbeddingRequest, ChatEmbeddingRequest)

    async def work(self, fields: EmbeddingFields, model: Model) -> Work:
        width = vector_width(fields.dimensions, model)
        return document_work(fields, model, common_pb2.MODEL_TASK_EMBED, width)

    def write(self, fields: EmbeddingFields, pooled: Pooled) -> bytes:
        encoded = fields.encoding_format == "base64"
        data = [
            Embedding("embedding", index, numbers_of(vector, base64=encoded))
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
