"""`POST /v1/embeddings`."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from catenary.v1 import common_pb2
from gateway.http.respond import Deferred
from gateway.openapi.operation import ASKS, operation
from gateway.openapi.routing import Routes
from gateway.pooling.answers import Embedding, EmbeddingList, usage_of
from gateway.pooling.documents import document_work, read_documents
from gateway.pooling.endpoint import PooledEndpoint
from gateway.pooling.scores import numbers_of
from gateway.pooling.service import PoolingService
from gateway.pooling.work import Pooled, Work, vector_width
from gateway.schemas.chat_pooling import ChatEmbeddingRequest
from gateway.schemas.limits import RequestLimits
from gateway.schemas.pooling import EmbeddingFields, EmbeddingRequest
from gateway.text.models import Model


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
