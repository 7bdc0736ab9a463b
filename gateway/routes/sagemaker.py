"""`/ping` and `POST /invocations`, as SageMaker asks of a container; and `GET /version`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.responses import Response

from catenary import __version__
from gateway.errors import ErrorEnvelope, bad_request
from gateway.generation import Endpoint, GenerationService
from gateway.http import Deferred, Version, json_response
from gateway.openapi import ASKS, Routes, operation
from gateway.routes.chat_completions import ChatEndpoint
from gateway.routes.completions import CompletionEndpoint
from gateway.schemas import ChatRequest, CompletionRequest
from gateway.streaming import ChatChunk, ChatCompletion, Completion


def routes(service: GenerationService, *, can_serve: Callable[[], bool]) -> Routes:
    """The routes. `can_serve` as for /health."""
    router = Routes()
    endpoints: dict[str, Endpoint[Any]] = {"messages": ChatEndpoint(), "prompt": CompletionEndpoint()}

    def choose(body: dict[str, Any]) -> Endpoint[Any]:
        found = [endpoint for field, endpoint in endpoints.items() if field in body]
        if len(found) != 1:
            raise bad_request(
                "The body must be a chat (with 'messages') or a completion (with 'prompt').",
                "messages",
                "invalid_value" if found else "missing_required_parameter",
            )
        return found[0]

    serve = partial(service.dispatch, choose)

    @router.head("/ping", None)
    @router.post("/ping", None)
    @router.get("/ping", operation("An engine serves a model", None, also={503: None}))
    async def ping() -> Response:
        return Response(status_code=200 if can_serve() else 503)

    @router.post(
        "/invocations",
        operation(
            "A chat or a completion, by the body's fields",
            (ChatCompletion, Completion),
            ChatRequest,
            CompletionRequest,
            event=(ChatChunk, Completion, ErrorEnvelope),
            fails=ASKS,
        ),
    )
    async def invocations() -> Response:
        return Deferred(serve)

    @router.head("/version", None)
    @router.get("/version", operation("Version of the gateway", Version))
    async def version() -> Response:
        return json_response(Version(__version__))

    return router
