"""`/ping` and `POST /invocations`, as SageMaker asks of a container; and `GET /version`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.responses import Response

from catenary.v1 import common_pb2
from catenary.version import __version__
from gateway.errors import ErrorEnvelope, bad_request
from gateway.generation.requests import ActiveRequest
from gateway.generation.service import GenerationService
from gateway.http.answers import Call, Version, json_response
from gateway.pooling.answers import ClassifiedList, EmbeddingList, PooledList, Ranking, ScoreList
from gateway.pooling.service import PoolingService
from gateway.routes.completions import answer_chat, answer_completion, read_chat, read_completion
from gateway.routes.pooling import (
    answer_classify,
    answer_embedding,
    answer_pooling,
    answer_rerank,
    answer_score,
    read_classify,
    read_embedding,
    read_pooling,
    read_rerank,
    read_score,
)
from gateway.routing import ASKS, Access, Routes
from gateway.schemas.base import RequestLimits
from gateway.schemas.chat import ChatRequest
from gateway.schemas.completion import CompletionRequest
from gateway.schemas.pooling import (
    SCORE_SIDES,
    ChatClassifyRequest,
    ChatEmbeddingRequest,
    ChatPoolingRequest,
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from gateway.streaming.answers import ChatChunk, ChatCompletion, Completion
from gateway.text.models import tasks_of

# The field by which a request is known, of those that no other has.
_FORMS = {
    "messages": ("messages",),
    "prompt": ("prompt",),
    "input": ("input",),
    "query": ("query",),
    "text_1": tuple(name for pair in SCORE_SIDES for name in pair if name != "documents"),
}
_EXPECTED = (
    "The body must be a chat (with 'messages'), a completion ('prompt'), texts to embed or to classify "
    "('input'), a ranking ('query' and 'documents') or pairs to score ('text_1' and 'text_2')"
)


Read = Callable[[dict[str, Any], RequestLimits], Any]
Answer = Callable[[ActiveRequest, Any], Awaitable[None]]


class Invocations:
    """Requests of any kind, which their fields and the model's task determine."""

    def __init__(self, generating: GenerationService, pooling: PoolingService) -> None:
        self._requests = generating.requests
        self._chat: tuple[Read, Answer] = read_chat, partial(answer_chat, generating)
        self._completion: tuple[Read, Answer] = read_completion, partial(answer_completion, generating)
        self._rerank: tuple[Read, Answer] = read_rerank, partial(answer_rerank, pooling)
        self._score: tuple[Read, Answer] = read_score, partial(answer_score, pooling)
        self._embed: tuple[Read, Answer] = read_embedding, partial(answer_embedding, pooling)
        self._classify: tuple[Read, Answer] = read_classify, partial(answer_classify, pooling)
        self._pool: tuple[Read, Answer] = read_pooling, partial(answer_pooling, pooling)

    async def serve(self, call: Call) -> None:
        """Answer one request. Raises ApiError before the answer has begun, ClientGone at any time."""
        async with self._requests.active(call) as request:
            body = await request.body()
            read, answer = self._kind(body)
            fields = read(body, self._requests.limits)
            del body
            await answer(request, fields)

    def _kind(self, body: dict[str, Any]) -> tuple[Read, Answer]:
        """Return the reader and the answerer of this body.

        Raises ApiError: 400 if it fits several kinds or none, 404 for a model that is not there."""
        form = _form(body)
        if form == "prompt":
            return self._completion
        if form == "query":
            return self._rerank
        if form == "text_1":
            return self._score
        name = body["model"]
        if not isinstance(name, str):
            # It is refused where the body is read.
            return self._chat if form == "messages" else self._embed
        tasks = tasks_of(self._requests.models.info(name).info)
        if common_pb2.MODEL_TASK_GENERATE in tasks:
            if form == "input":
                raise bad_request(
                    "This model generates text: the body must have 'messages' or 'prompt'.",
                    form,
                    "unsupported_value",
                )
            return self._chat
        if body.get("task") is not None:
            return self._pool
        return self._embed if common_pb2.MODEL_TASK_EMBED in tasks else self._classify


def _form(body: dict[str, Any]) -> str:
    """Return the kind of a request. Raises ApiError 400."""
    fields = {
        form: next((name for name in names if body.get(name) is not None), None)
        for form, names in _FORMS.items()
    }
    found = [(form, name) for form, name in fields.items() if name is not None]
    if len(found) > 1:
        (_, first), (_, second) = found[:2]
        raise bad_request(f"{_EXPECTED}: '{first}' and '{second}' do not go together.", first)
    if not found:
        missing = "query" if body.get("documents") is not None else "messages"
        raise bad_request(f"{_EXPECTED}.", missing, "missing_required_parameter")
    return found[0][0]


def sagemaker_routes(
    generating: GenerationService,
    pooling: PoolingService,
    *,
    can_serve: Callable[[], bool],
) -> Routes:
    router = Routes()
    requests = Invocations(generating, pooling)

    @router.get(
        "/ping",
        "An engine serves a model",
        None,
        also={503: None},
        aliases=(
            "HEAD",
            "POST",
        ),
        access=Access.PROBE,
    )
    async def ping() -> Response:
        return Response(status_code=200 if can_serve() else 503)

    @router.post(
        "/invocations",
        "A request to the model, of the kind that the body's fields and the model's task tell",
        (ChatCompletion, Completion, EmbeddingList, ClassifiedList, PooledList, Ranking, ScoreList),
        ChatRequest,
        CompletionRequest,
        EmbeddingRequest,
        ChatEmbeddingRequest,
        ClassifyRequest,
        ChatClassifyRequest,
        PoolingRequest,
        ChatPoolingRequest,
        RerankRequest,
        ScoreRequest,
        event=(ChatChunk, Completion, ErrorEnvelope),
        fails=ASKS,
        limited=True,
    )
    async def invocations(call: Call) -> None:
        await requests.serve(call)

    @router.get("/version", "Version of the gateway", Version, aliases=("HEAD",))
    async def version() -> Response:
        return json_response(Version(__version__))

    return router
