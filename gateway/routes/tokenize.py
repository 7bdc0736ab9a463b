"""`POST /tokenize` and `/detokenize`, and the routes that show what a generating request becomes."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.responses import Response

from gateway.generation.prompt_answers import RenderedRequest, Tokens, TokensText
from gateway.generation.prompts import PromptHandler, PromptService
from gateway.http.respond import Deferred
from gateway.openapi.operation import ASKS, Operation, operation
from gateway.openapi.routing import Routes
from gateway.routes.chat_completions import ChatEndpoint
from gateway.routes.completions import CompletionEndpoint
from gateway.schemas.chat import ChatRequest
from gateway.schemas.chat_input import TokenizeChatRequest
from gateway.schemas.completion import CompletionRequest
from gateway.schemas.tokenize import DetokenizeRequest, TokenizeRequest


def routes(service: PromptService) -> Routes:
    """The routes; tokenize and detokenize also under /v1."""
    router = Routes()
    chats, texts = ChatEndpoint(), CompletionEndpoint()

    async def render_chat(body: dict[str, Any]) -> RenderedRequest:
        (prompt,) = await service.render(chats, body)
        return prompt

    def add(path: str, handler: PromptHandler, described: Operation) -> None:
        @router.post(path, described)
        async def route() -> Response:
            return Deferred(partial(service.serve, handler))

    for prefix in ("", "/v1"):
        add(
            f"{prefix}/tokenize",
            service.tokenize,
            operation(
                "Text or a chat to token ids", Tokens, TokenizeRequest, TokenizeChatRequest, fails=ASKS
            ),
        )
        add(
            f"{prefix}/detokenize",
            service.detokenize,
            operation("Token ids to text", TokensText, DetokenizeRequest, fails=ASKS),
        )
    add(
        "/v1/chat/completions/render",
        render_chat,
        operation("The token ids that a chat becomes", RenderedRequest, ChatRequest, fails=ASKS),
    )
    add(
        "/v1/completions/render",
        partial(service.render, texts),
        operation(
            "The token ids that each prompt becomes", list[RenderedRequest], CompletionRequest, fails=ASKS
        ),
    )
    return router
