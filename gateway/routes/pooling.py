"""`/v1/embeddings`, `/pooling`, `/classify`, `/rerank` and `/score`, under each of their paths."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from catenary.v1 import common_pb2
from gateway.errors import bad_request
from gateway.generation.requests import ActiveRequest
from gateway.http.answers import Call, send_json
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
from gateway.pooling.service import PoolingService
from gateway.pooling.work import Pooled, vector_width
from gateway.routing import ASKS, Routes
from gateway.schemas.base import RequestLimits, parse_request
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
from gateway.text.models import Model, task_names

_EMBED = common_pb2.MODEL_TASK_EMBED
_SCORE = common_pb2.MODEL_TASK_SCORE
_CLASSIFY = common_pb2.MODEL_TASK_CLASSIFY


async def _send(call: Call, write: Callable[[], msgspec.Struct]) -> None:
    # Thousands of vectors take long to write, and others wait for the loop.
    await send_json(call.send, await asyncio.to_thread(lambda: msgspec.json.encode(write())))


def read_embedding(body: dict[str, Any], limits: RequestLimits) -> EmbeddingFields:
    """Read texts, or a chat. Raises ApiError 400."""
    return read_documents(body, limits, EmbeddingRequest, ChatEmbeddingRequest)


async def answer_embedding(service: PoolingService, request: ActiveRequest, fields: EmbeddingFields) -> None:
    """Answer with vectors, in the order of the input; or with one of a chat. Raises ApiError, ClientGone."""
    model = request.admit(fields, (_EMBED,))
    work = document_work(fields, model, _EMBED, vector_width(fields.dimensions, model))
    pooled = await service.run(work, model, request, id_prefix="embd-")
    await _send(request.call, lambda: _embeddings(fields, pooled))


def _embeddings(fields: EmbeddingFields, pooled: Pooled) -> EmbeddingList:
    encoded = fields.encoding_format == "base64"
    data = [
        Embedding("embedding", index, numbers_of(vector, base64=encoded))
        for index, vector in enumerate(pooled.vectors)
    ]
    return EmbeddingList("list", pooled.model.asked, data, usage_of(pooled.prompt_tokens))


def embedding_routes(service: PoolingService) -> Routes:
    router, requests = Routes(), service.requests

    @router.post(
        "/v1/embeddings",
        "Turn texts into vectors",
        EmbeddingList,
        EmbeddingRequest,
        ChatEmbeddingRequest,
        fails=ASKS,
        limited=True,
    )
    async def embeddings(call: Call) -> None:
        async with requests.active(call) as request:
            fields = read_embedding(await request.body(), requests.limits)
            await answer_embedding(service, request, fields)

    return router


def read_pooling(body: dict[str, Any], limits: RequestLimits) -> PoolingFields:
    """Read texts, or a chat. Raises ApiError 400."""
    return read_documents(body, limits, PoolingRequest, ChatPoolingRequest)


async def answer_pooling(service: PoolingService, request: ActiveRequest, fields: PoolingFields) -> None:
    """Answer with vectors, scores, or numbers of classes, in the order of the input.

    Raises ApiError, ClientGone."""
    model = request.admit(fields, (_EMBED, _SCORE, _CLASSIFY))
    names = task_names(model.info)
    if fields.task is not None and fields.task not in names:
        raise bad_request(
            f"Unsupported 'task': this model's is {' or '.join(names)}.", "task", "unsupported_value"
        )
    work = document_work(fields, model, model.info.tasks[0], vector_width(fields.dimensions, model))
    pooled = await service.run(work, model, request, id_prefix="pool-")
    await _send(request.call, lambda: _pooled(fields, pooled))


def _pooled(fields: PoolingFields, pooled: Pooled) -> PooledList:
    encoded = fields.encoding_format == "base64"
    data = [
        PooledData(index, "pooling", numbers_of(vector, base64=encoded))
        for index, vector in enumerate(pooled.vectors)
    ]
    usage = usage_of(pooled.prompt_tokens)
    return PooledList(pooled.request_id, "list", pooled.created, pooled.model.asked, data, usage)


def pooling_routes(service: PoolingService) -> Routes:
    router, requests = Routes(), service.requests

    @router.post(
        ("/pooling", "/v1/pooling"),
        "Run texts through a model that does not generate",
        PooledList,
        PoolingRequest,
        ChatPoolingRequest,
        fails=ASKS,
        limited=True,
    )
    async def pooling(call: Call) -> None:
        async with requests.active(call) as request:
            fields = read_pooling(await request.body(), requests.limits)
            await answer_pooling(service, request, fields)

    return router


def read_classify(body: dict[str, Any], limits: RequestLimits) -> PooledFields:
    """Read texts, or a chat. Raises ApiError 400."""
    return read_documents(body, limits, ClassifyRequest, ChatClassifyRequest)


async def answer_classify(service: PoolingService, request: ActiveRequest, fields: PooledFields) -> None:
    """Answer with the documents' classes, in the order of the input. Raises ApiError, ClientGone.

    A model that scores has one class, without a name."""
    model = request.admit(fields, (_CLASSIFY, _SCORE))
    work = document_work(fields, model, model.info.tasks[0])
    pooled = await service.run(work, model, request, id_prefix="classify-")
    await _send(request.call, lambda: _classes(pooled))


def _classes(pooled: Pooled) -> ClassifiedList:
    labels = pooled.model.info.labels
    data = [_classified(index, unpack(vector), labels) for index, vector in enumerate(pooled.vectors)]
    usage = usage_of(pooled.prompt_tokens)
    return ClassifiedList(pooled.request_id, "list", pooled.created, pooled.model.asked, data, usage)


def _classified(index: int, numbers: tuple[float, ...], labels: Sequence[str]) -> Classified:
    likeliest = max(range(len(numbers)), key=numbers.__getitem__)
    return Classified(index, labels[likeliest] if labels else None, numbers, len(numbers))


def classify_routes(service: PoolingService) -> Routes:
    router, requests = Routes(), service.requests

    @router.post(
        ("/classify", "/v1/classify"),
        "Classify texts",
        ClassifiedList,
        ClassifyRequest,
        ChatClassifyRequest,
        fails=ASKS,
        limited=True,
    )
    async def classify(call: Call) -> None:
        async with requests.active(call) as request:
            fields = read_classify(await request.body(), requests.limits)
            await answer_classify(service, request, fields)

    return router


def read_rerank(body: dict[str, Any], limits: RequestLimits) -> RerankRequest:
    """Read a query and documents. Raises ApiError 400."""
    return parse_request(RerankRequest, body, limits)


async def answer_rerank(
    service: PoolingService, request: ActiveRequest, fields: RerankRequest, *, cohere: bool = False
) -> None:
    """Answer with the documents, the best first. Raises ApiError, ClientGone.

    `cohere`: in the shape of Cohere's second version and not of Jina's."""
    model = request.admit(fields, (_EMBED, _SCORE))
    documents: Sequence[str] = fields.documents
    if most := fields.max_tokens_per_doc:
        documents = await request.until_gone(asyncio.to_thread(_shortened, documents, model, most))
    work = compare([fields.query] * len(documents), documents, model, fields, param="documents")
    pooled = await service.run(work, model, request, id_prefix="rerank-")
    await _send(request.call, lambda: _ranking(fields, pooled, cohere=cohere))


def _ranking(fields: RerankRequest, pooled: Pooled, *, cohere: bool) -> Ranking | CohereRanking:
    scores = scores_of(pooled)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    shown = fields.return_documents if fields.return_documents is not None else not cohere
    results = [Ranked(index, scores[index]) for index in order[: fields.top_n or None]]
    for result in results if shown else ():
        result.document = RankedDocument(fields.documents[result.index])
    answer_id, model = pooled.request_id, pooled.model.asked
    if not cohere:
        return Ranking(answer_id, model, results, usage_of(pooled.prompt_tokens))
    meta = RankingMeta(ApiVersion("2"), BilledTokens(pooled.prompt_tokens))
    return CohereRanking(answer_id, model, results, meta)


def _shortened(documents: Sequence[str], model: Model, tokens: int) -> list[str]:
    return [model.vocabulary.shortened(document, tokens) for document in documents]


def rerank_routes(service: PoolingService) -> Routes:
    router, requests = Routes(), service.requests
    summary = "Sort documents by how well they answer a query"

    async def serve(call: Call, *, cohere: bool) -> None:
        async with requests.active(call) as request:
            fields = read_rerank(await request.body(), requests.limits)
            await answer_rerank(service, request, fields, cohere=cohere)

    @router.post(("/rerank", "/v1/rerank"), summary, Ranking, RerankRequest, fails=ASKS, limited=True)
    async def rerank(call: Call) -> None:
        await serve(call, cohere=False)

    @router.post("/v2/rerank", summary, CohereRanking, RerankRequest, fails=ASKS, limited=True)
    async def rerank_v2(call: Call) -> None:
        await serve(call, cohere=True)

    return router


def read_score(body: dict[str, Any], limits: RequestLimits) -> ScoreRequest:
    """Read pairs. Raises ApiError 400."""
    return parse_request(ScoreRequest, body, limits)


async def answer_score(service: PoolingService, request: ActiveRequest, fields: ScoreRequest) -> None:
    """Answer with the scores of pairs, in their order. Raises ApiError, ClientGone."""
    model = request.admit(fields, (_EMBED, _SCORE))
    first, second = fields.sides
    work = compare(first, second, model, fields, param=fields.names[1])
    pooled = await service.run(work, model, request, id_prefix="score-")
    await _send(request.call, lambda: _scores(pooled))


def _scores(pooled: Pooled) -> ScoreList:
    data = [Score(index, "score", score) for index, score in enumerate(scores_of(pooled))]
    usage = usage_of(pooled.prompt_tokens)
    return ScoreList(pooled.request_id, "list", pooled.created, pooled.model.asked, data, usage)


def score_routes(service: PoolingService) -> Routes:
    router, requests = Routes(), service.requests

    @router.post(
        ("/score", "/v1/score"),
        "Score how well texts belong together",
        ScoreList,
        ScoreRequest,
        fails=ASKS,
        limited=True,
    )
    async def score(call: Call) -> None:
        async with requests.active(call) as request:
            fields = read_score(await request.body(), requests.limits)
            await answer_score(service, request, fields)

    return router
