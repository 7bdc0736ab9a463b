"""`POST /v1/rerank`, `/rerank` and `/v2/rerank`."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from catenary.v1 import common_pb2
from gateway.http.respond import Deferred
from gateway.pooling.endpoint import PooledEndpoint
from gateway.pooling.scores import compare, scores_of
from gateway.pooling.service import PoolingService
from gateway.pooling.work import Pooled, Work
from gateway.routes.openapi import operation
from gateway.schemas import RequestLimits, parse_request
from gateway.schemas.pooling import RERANK, RerankRequest
from gateway.text.models import Model


class RerankEndpoint(PooledEndpoint[RerankRequest]):
    """Documents, the best first. `cohere`: in the shape of Cohere's second version and not of Jina's."""

    id_prefix = "rerank-"
    tasks = (common_pb2.MODEL_TASK_EMBED, common_pb2.MODEL_TASK_SCORE)

    def __init__(self, *, cohere: bool) -> None:
        self._cohere = cohere

    def parse(self, body: dict[str, Any], limits: RequestLimits) -> RerankRequest:
        return parse_request(RerankRequest, body, RERANK, limits)

    def work(self, fields: RerankRequest, model: Model) -> Work:
        return compare(
            _queries(fields),
            fields.documents,
            model,
            param="documents",
            truncate=fields.truncate_prompt_tokens,
        )

    def write(self, fields: RerankRequest, pooled: Pooled) -> bytes:
        scores = scores_of(_queries(fields), fields.documents, pooled)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        shown = fields.return_documents if fields.return_documents is not None else not self._cohere
        results: list[dict[str, Any]] = [
            {"index": index, "relevance_score": scores[index]} for index in order[: fields.top_n or None]
        ]
        for result in results if shown else ():
            result["document"] = {"text": fields.documents[result["index"]]}
        answer: dict[str, Any] = {"id": pooled.request_id, "model": pooled.model.name, "results": results}
        if self._cohere:
            answer["meta"] = {
                "api_version": {"version": "2"},
                "tokens": {"input_tokens": pooled.prompt_tokens},
            }
        else:
            answer["usage"] = {"prompt_tokens": pooled.prompt_tokens, "total_tokens": pooled.prompt_tokens}
        return msgspec.json.encode(answer)


def _queries(fields: RerankRequest) -> list[str]:
    return [fields.query] * len(fields.documents)


def routes(service: PoolingService) -> APIRouter:
    """The routes."""
    router = APIRouter()
    jina = partial(service.serve, RerankEndpoint(cohere=False))
    cohere = partial(service.serve, RerankEndpoint(cohere=True))
    described = operation(RerankRequest, "Sort documents by how well they answer a query")

    @router.post("/rerank", **described)
    @router.post("/v1/rerank", **described)
    async def rerank() -> Response:
        return Deferred(jina)

    @router.post("/v2/rerank", **described)
    async def rerank_v2() -> Response:
        return Deferred(cohere)

    return router
