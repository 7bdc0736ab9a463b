"""`POST /v1/chat/completions`."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.responses import Response

from catenary.v1 import tokenizer_pb2
from gateway.constraints import Wanted
from gateway.errors import ErrorEnvelope
from gateway.generation import (
    Endpoint,
    GenerationService,
    choose_constraint,
    choose_parser,
    to_chat_input,
    truncation,
)
from gateway.http import Deferred
from gateway.openapi import ASKS, Routes, operation
from gateway.parsing import ParserChoice
from gateway.schemas import ChatRequest, RequestLimits, parse_request
from gateway.streaming import ChatChunk, ChatCompletion, ChatWriter
from gateway.text import Model, Rendered, TokenizerPool


class ChatEndpoint(Endpoint[ChatRequest]):
    """Chats: rendered by the model's template, answered to the end of the context unless limited."""

    id_prefix = "chatcmpl-"
    prompt_param = "messages"
    writer = ChatWriter

    def parse(self, body: dict[str, Any], limits: RequestLimits) -> ChatRequest:
        return parse_request(ChatRequest, body, limits)

    def parsing(self, fields: ChatRequest, model: Model) -> ParserChoice:
        return choose_parser(fields, model.traits)

    def constraint(self, fields: ChatRequest, model: Model) -> Wanted | None:
        return choose_constraint(fields, model.traits)

    async def render(
        self, fields: ChatRequest, model: Model, pool: TokenizerPool, request_id: str
    ) -> Rendered:
        keep = truncation(fields, model.max_model_len)
        return await pool.render(
            tokenizer_pb2.RenderRequest(
                request_id=request_id,
                model=model.name,
                chat=to_chat_input(fields, model.traits),
                max_prompt_tokens=model.max_model_len if keep is None else None,
                truncate_to=keep,
            )
        )


def routes(service: GenerationService) -> Routes:
    """The route."""
    router = Routes()
    serve = partial(service.serve, ChatEndpoint())

    @router.post(
        "/v1/chat/completions",
        operation(
            "Go on with a chat",
            ChatCompletion,
            ChatRequest,
            event=(ChatChunk, ErrorEnvelope),
            fails=ASKS,
        ),
    )
    async def chat_completions() -> Response:
        return Deferred(serve)

    return router
