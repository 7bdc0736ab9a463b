"""`/v1/embeddings`, `/pooling`, `/classify`, `/rerank` and `/score`, under each of their paths."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from catenary.v1 import common_pb2
from gateway.errors import bad_request
from gateway.http.answers import Deferred
from gateway.pooling.answers import (
    ApiVersion,
    BilledTokens,
    Classified,
    ClassifiedList,
    CohereRanking,
    Embedding,
    EmbeddingList,
    PooledData,
    PooledList,
    Ranked,
    RankedDocument,
    Ranking,
    RankingMeta,
    Score,
    ScoreList,
    compare,
    document_work,
    numbers_of,
    read_documents,
    scores_of,
    unpack,
    usage_of,
)
from gateway.pooling.service import PooledEndpoint, PoolingService
from gateway.pooling.work import Pooled, Work, vector_width
from gateway.routing import ASKS, Routes, operation
from gateway.schemas.base import RequestLimits
from gateway.schemas.pooling import (
    ChatClassifyRequest,
    ChatEmbeddingRequest,
    ChatPoolingRequest,
    ClassifyRequest,
    EmbeddingFields,
    EmbeddingRequest,
    PooledFields,
    PoolingFields,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from gateway.schemas.validation import parse_request
from gateway.text.models import Model, task_names


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


def embedding_routes(service: PoolingService) -> Routes:
    """The route."""
    router = Routes()
    serve = partial(service.serve, EmbeddingEndpoint())

    @router.post(
        "/v1/embeddings",
        operation(
            "Turn texts into vectors",
            EmbeddingList,
            EmbeddingRequest,
            ChatEmbeddingRequest,
            fails=ASKS,
            limited=True,
        ),
    )
    async def embeddings() -> Response:
        return Deferred(serve)

    return router


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


def pooling_routes(service: PoolingService) -> Routes:
    """The routes."""
    router = Routes()
    serve = partial(service.serve, PoolingEndpoint())
    described = operation(
        "Run texts through a model that does not generate",
        PooledList,
        PoolingRequest,
        ChatPoolingRequest,
        fails=ASKS,
        limited=True,
    )

    @router.post("/pooling", described)
    @router.post("/v1/pooling", described)
    async def pooling() -> Response:
        return Deferred(serve)

    return router


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


def classify_routes(service: PoolingService) -> Routes:
    """The routes."""
    router = Routes()
    serve = partial(service.serve, ClassifyEndpoint())
    described = operation(
        "Classify texts", ClassifiedList, ClassifyRequest, ChatClassifyRequest, fails=ASKS, limited=True
    )

    @router.post("/classify", described)
    @router.post("/v1/classify", described)
    async def classify() -> Response:
        return Deferred(serve)

    return router


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


def rerank_routes(service: PoolingService) -> Routes:
    """The routes."""
    router = Routes()
    jina = partial(service.serve, RerankEndpoint(cohere=False))
    cohere = partial(service.serve, RerankEndpoint(cohere=True))
    summary = "Sort documents by how well they answer a query"
    described = operation(summary, Ranking, RerankRequest, fails=ASKS, limited=True)

    @router.post("/rerank", described)
    @router.post("/v1/rerank", described)
    async def rerank() -> Response:
        return Deferred(jina)

    @router.post("/v2/rerank", operation(summary, CohereRanking, RerankRequest, fails=ASKS, limited=True))
    async def rerank_v2() -> Response:
        return Deferred(cohere)

    return router


class ScoreEndpoint(PooledEndpoint[ScoreRequest]):
    """Scores of pairs, in their order."""

    id_prefix = "score-"
    tasks = (common_pb2.MODEL_TASK_EMBED, common_pb2.MODEL_TASK_SCORE)

    def parse(self, body: dict[str, Any], limits: RequestLimits) -> ScoreRequest:
        return parse_request(ScoreRequest, body, limits)

    async def work(self, fields: ScoreRequest, model: Model) -> Work:
        first, second = fields.sides
        return compare(first, second, model, fields, param=fields.names[1])

    def write(self, fields: ScoreRequest, pooled: Pooled) -> bytes:
        scores = scores_of(pooled)
        answer = ScoreList(
            pooled.request_id,
            "list",
            pooled.created,
            pooled.model.asked,
            [Score(index, "score", score) for index, score in enumerate(scores)],
            usage_of(pooled.prompt_tokens),
        )
        return msgspec.json.encode(answer)


def score_routes(service: PoolingService) -> Routes:
    """The routes."""
    router = Routes()
    serve = partial(service.serve, ScoreEndpoint())
    described = operation(
        "Score how well texts belong together", ScoreList, ScoreRequest, fails=ASKS, limited=True
    )

    @router.post("/score", described)
    @router.post("/v1/score", described)
    async def score() -> Response:
        return Deferred(serve)

    return router
