"""`POST /pooling` and `/v1/pooling`."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from catenary.v1 import common_pb2
from gateway.errors import bad_request
from gateway.http.respond import Deferred
from gateway.openapi.operation import ASKS, operation
from gateway.openapi.routing import Routes
from gateway.pooling.answers import PooledData, PooledList, usage_of
from gateway.pooling.documents import document_work, read_documents
from gateway.pooling.endpoint import PooledEndpoint
from gateway.pooling.scores import numbers_of
from gateway.pooling.service import PoolingService
from gateway.pooling.work import Pooled, Work, vector_width
from gateway.schemas.chat_pooling import ChatPoolingRequest
from gateway.schemas.limits import RequestLimits
from gateway.schemas.pooling import PoolingFields, PoolingRequest
from gateway.text.models import Model, task_names


class PoolingEndpoint(PooledEndpoint[PoolingFields]):
    """Results for documents, in the order of the input: vectors, scores, or numbers of classes."""

    id_prefix = "pool-"
    tasks = (common_pb2.MODEL_TASK_EMBED, common_pb2.MODEL_TASK_SCORE, common_pb2.MODEL_TASK_CLASSIFY)

    def parse(self, body: dict[str, Any], limits: RequestLimits) -> PoolingFields:
        return read_documents(body, limits, PoolingRequest, ChatPoolingRequest)

    async def work(self, fields: PoolingFields, model: Model) -> Work:
        names = task_names(model.info)
        if fields.task is not None and fields.task not in names:
            raise bad_request(
                f"Unsupported 'task': this model's is {' or '.join(names)}.", "task", "unsupported_value"
            )
        width = vector_width(fields.dimensions, model)
        return document_work(fields, model, model.info.tasks[0], width)

    def write(self, fields: PoolingFields, pooled: Pooled) -> bytes:
        encoded = fields.encoding_format == "base64"
        answer = PooledList(
            pooled.request_id,
            "list",
            pooled.created,
            pooled.model.asked,
            [
                PooledData(index, "pooling", numbers_of(vector, base64=encoded))
                for index, vector in enumerate(pooled.vectors)
            ],
            usage_of(pooled.prompt_tokens),
        )
        return msgspec.json.encode(answer)


def routes(service: PoolingService) -> Routes:
    """The routes."""
    router = Routes()
    serve = partial(service.serve, PoolingEndpoint())
    described = operation(
        "Run texts through a model that does not generate",
        PooledList,
        PoolingRequest,
        ChatPoolingRequest,
        fails=ASKS,
    )

    @router.post("/pooling", described)
    @router.post("/v1/pooling", described)
    async def pooling() -> Response:
        return Deferred(serve)

    return router
