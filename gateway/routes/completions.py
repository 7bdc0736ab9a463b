"""Chat and plain completions, and `/tokenize`, `/detokenize` and `/render` of the same requests."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from starlette.responses import Response

from catenary.v1 import tokenizer_pb2
from gateway.auth import Caller
from gateway.constraints import Wanted
from gateway.errors import ErrorEnvelope
from gateway.generation.chat import choose_constraint, choose_parser, to_chat_input
from gateway.generation.plan import truncation
from gateway.generation.prompts import PromptHandler, PromptService, RenderedRequest, Tokens, TokensText
from gateway.generation.service import Endpoint, GenerationService
from gateway.http.answers import Deferred
from gateway.parsing.choice import ParserChoice
from gateway.routing import ASKS, Operation, Routes, operation
from gateway.schemas.base import RequestLimits
from gateway.schemas.chat import ChatRequest, TokenizeChatRequest
from gateway.schemas.completion import (
    DEFAULT_MAX_TOKENS,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from gateway.schemas.validation import parse_request
from gateway.streaming.chat import ChatChunk, ChatCompletion, ChatWriter
from gateway.streaming.completion import Completion, CompletionWriter
from gateway.text.models import Model
from gateway.text.pool import TokenizerPool
from gateway.text.target import Rendered


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
        self, fields: ChatRequest, model: Model, pool: TokenizerPool, request_id: str, caller: Caller
    ) -> Rendered:
        keep = truncation(fields, model.max_model_len)
        return await pool.render(
            tokenizer_pb2.RenderRequest(
                request_id=request_id,
                tenant=caller.owner,
                model=model.name,
                chat=to_chat_input(fields, model.traits),
                max_prompt_tokens=model.max_model_len if keep is None else None,
                truncate_to=keep,
            )
        )


def chat_completion_routes(service: GenerationService) -> Routes:
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
            limited=True,
        ),
    )
    async def chat_completions() -> Response:
        return Deferred(serve)

    return router


class CompletionEndpoint(Endpoint[CompletionRequest]):
    """Plain prompts, as text or as ids."""

    id_prefix = "cmpl-"
    prompt_param = "prompt"
    default_max_tokens: ClassVar[int | None] = DEFAULT_MAX_TOKENS
    scores_stop_token = True
    writer = CompletionWriter

    def parse(self, body: dict[str, Any], limits: RequestLimits) -> CompletionRequest:
        return parse_request(CompletionRequest, body, limits)

    async def render(
        self, fields: CompletionRequest, model: Model, pool: TokenizerPool, request_id: str, caller: Caller
    ) -> Rendered:
        texts = [prompt for prompt in fields.prompt if isinstance(prompt, str)]
        if not texts:
            return Rendered.of_ids([prompt for prompt in fields.prompt if isinstance(prompt, list)])
        keep = truncation(fields, model.max_model_len)
        return await pool.render(
            tokenizer_pb2.RenderRequest(
                request_id=request_id,
                tenant=caller.owner,
                model=model.name,
                completion=tokenizer_pb2.CompletionInput(
                    prompts=texts, add_special_tokens=fields.add_special_tokens
                ),
                max_prompt_tokens=model.max_model_len if keep is None else None,
                truncate_to=keep,
            )
        )


def completion_routes(service: GenerationService) -> Routes:
    """The route."""
    router = Routes()
    serve = partial(service.serve, CompletionEndpoint())

    @router.post(
        "/v1/completions",
        operation(
            "Go on with a text",
            Completion,
            CompletionRequest,
            event=(Completion, ErrorEnvelope),
            fails=ASKS,
            limited=True,
        ),
    )
    async def completions() -> Response:
        return Deferred(serve)

    return router


def tokenize_routes(service: PromptService) -> Routes:
    """The routes; tokenize and detokenize also under /v1."""
    router = Routes()
    chats, texts = ChatEndpoint(), CompletionEndpoint()

    async def render_chat(body: dict[str, Any], caller: Caller) -> RenderedRequest:
        (prompt,) = await service.render(chats, body, caller)
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
                "Text or a chat to token ids",
                Tokens,
                TokenizeRequest,
                TokenizeChatRequest,
                fails=ASKS,
                limited=False,
            ),
        )
        add(
            f"{prefix}/detokenize",
            service.detokenize,
            operation("Token ids to text", TokensText, DetokenizeRequest, fails=ASKS, limited=False),
        )
    add(
        "/v1/chat/completions/render",
        render_chat,
        operation(
            "The token ids that a chat becomes", RenderedRequest, ChatRequest, fails=ASKS, limited=False
        ),
    )
    add(
        "/v1/completions/render",
        partial(service.render, texts),
        operation(
            "The token ids that each prompt becomes",
            list[RenderedRequest],
            CompletionRequest,
            fails=ASKS,
            limited=False,
        ),
    )
    return router
