"""`POST /v1/rerank`, `/rerank` and `/v2/rerank`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from catenary.v1 import common_pb2
from gateway.http.respond import Deferred
from gateway.openapi.operation import ASKS, operation
from gateway.openapi.routing import Routes
from gateway.pooling.answers import (
    ApiVersion,
    BilledTokens,
    CohereRanking,
    Ranked,
    RankedDocument,
    Ranking,
    RankingMeta,
    usage_of,
)
from gateway.pooling.endpoint import PooledEndpoint
from gateway.pooling.scores import compare, scores_of
from gateway.pooling.service import PoolingService
from gateway.pooling.work import Pooled, Work
from gateway.schemas.limits import RequestLimits
from gateway.schemas.pooling import RerankRequest
from gateway.schemas.validation import parse_request
from gateway.text.models import Model


class RerankEndpoint(PooledEndpoint[RerankRequest]):
    """Documents, the best first. `cohere`: in the shape of Cohere's second version and not of Jina's."""

    id_prefix = "rerank-"
    tasks = (common_pb2.MODEL_TASK_EMBED, common_pb2.MODEL_TASK_SCORE)

    def __init__(self, *, cohere: bool) -> None:
        self._cohere = cohere

    def parse(self, body: dict[str, Any], limits: RequestLimits) -> RerankRequest:
        return parse_request(RerankRequest, body, limits)

    async def work(self, fields: RerankRequest, model: Model) -> Work:
        documents: Sequence[str] = fields.documents
        if most := fields.max_tokens_per_doc:
            documents = await asyncio.to_thread(_shortened, documents, model, most)
        return compare([fields.query] * len(documents), documents, model, fields, param="documents")

    def write(self, fields: RerankRequest, pooled: Pooled) -> bytes:
        scores = scores_of(pooled)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        shown = fields.return_documents if fields.return_documents is not None else not self._cohere
        results = [Ranked(index, scores[index]) for index in order[: fields.top_n or None]]
        for result in results if shown else ():
            result.document = RankedDocument(fields.documents[result.index])
        answer_id, model = pooled.request_id, pooled.model.asked
        if not self._cohere:
            return msgspec.json.encode(Ranking(answer_id, model, results, usage_of(pooled.prompt_tokens)))
        meta = RankingMeta(ApiVersion("2"), BilledTokens(pooled.prompt_tokens))
        return msgspec.json.encode(CohereRanking(answer_id, model, results, meta))


def _shortened(documents: Sequence[str], model: Model, tokens: int) -> list[str]:
    return [model.vocabulary.shortened(document, tokens) for document in documents]


def routes(service: PoolingService) -> Routes:
    """The routes."""
    router = Routes()
    jina = partial(service.serve, RerankEndpoint(cohere=False))
    cohere = partial(service.serve, RerankEndpoint(cohere=True))
    summary = "Sort documents by how well they answer a query"
    described = operation(summary, Ranking, RerankRequest, fails=ASKS)

    @router.post("/rerank", described)
    @router.post("/v1/rerank", described)
    async def rerank() -> Response:
        return Deferred(jina)

    @router.post("/v2/rerank", operation(summary, CohereRanking, RerankRequest, fails=ASKS))
    async def rerank_v2() -> Response:
        return Deferred(cohere)

    return router
