"""`POST /classify` and `/v1/classify`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from catenary.v1 import common_pb2
from gateway.http.respond import Deferred
from gateway.openapi.operation import ASKS, operation
from gateway.openapi.routing import Routes
from gateway.pooling.answers import Classified, ClassifiedList, usage_of
from gateway.pooling.documents import document_work, read_documents
from gateway.pooling.endpoint import PooledEndpoint
from gateway.pooling.scores import unpack
from gateway.pooling.service import PoolingService
from gateway.pooling.work import Pooled, Work
from gateway.schemas.chat_pooling import ChatClassifyRequest
from gateway.schemas.limits import RequestLimits
from gateway.schemas.pooling import ClassifyRequest, PooledFields
from gateway.text.models import Model


class ClassifyEndpoint(PooledEndpoint[PooledFields]):
    """Classes of documents, in the order of the input. A model that scores has one class, without a name."""

    id_prefix = "classify-"
    tasks = (common_pb2.MODEL_TASK_CLASSIFY, common_pb2.MODEL_TASK_SCORE)

    def parse(self, body: dict[str, Any], limits: RequestLimits) -> PooledFields:
        return read_documents(body, limits, ClassifyRequest, ChatClassifyRequest)

    async def work(self, fields: PooledFields, model: Model) -> Work:
        return document_work(fields, model, model.info.tasks[0])

    def write(self, fields: PooledFields, pooled: Pooled) -> bytes:
        answer = ClassifiedList(
            pooled.request_id,
            "list",
            pooled.created,
            pooled.model.asked,
            [
                _classified(index, unpack(vector), pooled.model.info.labels)
                for index, vector in enumerate(pooled.vectors)
            ],
            usage_of(pooled.prompt_tokens),
        )
        return msgspec.json.encode(answer)


def _classified(index: int, numbers: tuple[float, ...], labels: Sequence[str]) -> Classified:
    likeliest = max(range(len(numbers)), key=numbers.__getitem__)
    return Classified(index, labels[likeliest] if labels else None, numbers, len(numbers))


def routes(service: PoolingService) -> Routes:
    """The routes."""
    router = Routes()
    serve = partial(service.serve, ClassifyEndpoint())
    described = operation("Classify texts", ClassifiedList, ClassifyRequest, ChatClassifyRequest, fails=ASKS)

    @router.post("/classify", described)
    @router.post("/v1/classify", described)
    async def classify() -> Response:
        return Deferred(serve)

    return router
