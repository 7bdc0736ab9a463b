"""`POST /v1/chat/completions`."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.responses import Response

from catenary.v1 import tokenizer_pb2
from gateway.constraints.wanted import Wanted
from gateway.errors import ErrorEnvelope
from gateway.generation.chat_input import to_chat_input
from gateway.generation.endpoint import Endpoint
from gateway.generation.parsing import choose_constraint, choose_parser
from gateway.generation.planning import truncation
from gateway.generation.service import GenerationService
from gateway.http.respond import Deferred
from gateway.openapi.operation import ASKS, operation
from gateway.openapi.routing import Routes
from gateway.parsing.choice import ParserChoice
from gateway.schemas.chat import ChatRequest
from gateway.schemas.limits import RequestLimits
from gateway.schemas.validation import parse_request
from gateway.streaming.chat import ChatChunk, ChatCompletion, ChatWriter
from gateway.text.models import Model
from gateway.text.pool import TokenizerPool
from gateway.text.rendered import Rendered


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
