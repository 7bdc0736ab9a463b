"""`POST /classify` and `/v1/classify`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from catenary.v1 import common_pb2
from gateway.http import Deferred
from gateway.openapi import ASKS, Routes, operation
from gateway.pooling import (
    Classified,
    ClassifiedList,
    Pooled,
    PooledEndpoint,
    PoolingService,
    Work,
    document_work,
    read_documents,
    unpack,
    usage_of,
)
from gateway.schemas import ChatClassifyRequest, ClassifyRequest, PooledFields, RequestLimits
from gateway.text import Model


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
