"""`POST /tokenize` and `/detokenize`, and the routes that show what a generating request becomes."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from gateway.generation.prompts import Handler, PromptService
from gateway.http.respond import Deferred
from gateway.routes.chat_completions import ChatEndpoint
from gateway.routes.completions import CompletionEndpoint
from gateway.routes.openapi import operation
from gateway.schemas import ChatRequest, CompletionRequest
from gateway.schemas.chat_input import TokenizeChatRequest
from gateway.schemas.tokenize import DetokenizeRequest, TokenizeRequest


def routes(service: PromptService) -> APIRouter:
    """The routes; tokenize and detokenize also under /v1."""
    router = APIRouter()
    chats, texts = ChatEndpoint(), CompletionEndpoint()

    async def render_chat(body: dict[str, Any]) -> dict[str, Any]:
        (prompt,) = await service.render(chats, body)
        return prompt

    def add(path: str, handler: Handler, described: dict[str, Any], **options: Any) -> None:
        async def route() -> Response:
            return Deferred(partial(service.serve, handler))

        router.add_api_route(path, route, methods=["POST"], **described, **options)

    for prefix in ("", "/v1"):
        shown = {"include_in_schema": not prefix}
        add(
            f"{prefix}/tokenize",
            service.tokenize,
            operation(TokenizeRequest, "Text or a chat to token ids", TokenizeChatRequest),
            **shown,
        )
        add(
            f"{prefix}/detokenize",
            service.detokenize,
            operation(DetokenizeRequest, "Token ids to text"),
            **shown,
        )
    add(
        "/v1/chat/completions/render",
        render_chat,
        operation(ChatRequest, "The token ids that a chat becomes"),
    )
    add(
        "/v1/completions/render",
        partial(service.render, texts),
        operation(CompletionRequest, "The token ids that each prompt becomes"),
    )
    return router
