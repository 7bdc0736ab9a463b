"""Chat and plain completions, and `/tokenize`, `/detokenize` and `/render` of the same requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from catenary.telemetry import new_id
from catenary.v1 import tokenizer_pb2
from gateway.auth import Caller
from gateway.constraints import wanted_of
from gateway.errors import ErrorEnvelope
from gateway.generation.chat import prepare_chat
from gateway.generation.plan import Prepared
from gateway.generation.prompts import PromptService, RenderedRequest, Tokens, TokensText, rendered_requests
from gateway.generation.requests import ActiveRequest
from gateway.generation.service import GenerationService, answer
from gateway.http.answers import Call, send_json
from gateway.routing import ASKS, Paths, Routes
from gateway.schemas.base import RequestLimits, RequestModel, parse_request
from gateway.schemas.chat import ChatRequest, TokenizeChatRequest
from gateway.schemas.completion import (
    DEFAULT_MAX_TOKENS,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from gateway.streaming.answers import ChatChunk, ChatCompletion, ChatWriter, Completion, CompletionWriter
from gateway.text.models import Model


def read_chat(body: dict[str, Any], limits: RequestLimits) -> ChatRequest:
    """Read a chat. Raises ApiError 400."""
    return parse_request(ChatRequest, body, limits)


async def answer_chat(service: GenerationService, request: ActiveRequest, fields: ChatRequest) -> None:
    """Answer a chat. Raises ApiError before the answer has begun, ClientGone at any time."""
    prepared = prepare_chat(fields, request.admit(fields), request.caller)
    plan = await service.plan(prepared, request)
    async with service.run(plan, request) as running:
        await answer(running, ChatWriter, request.call)


def chat_completion_routes(service: GenerationService) -> Routes:
    router, requests = Routes(), service.requests

    @router.post(
        "/v1/chat/completions",
        "Go on with a chat",
        ChatCompletion,
        ChatRequest,
        event=(ChatChunk, ErrorEnvelope),
        fails=ASKS,
        limited=True,
    )
    async def chat_completions(call: Call) -> None:
        async with requests.active(call) as request:
            fields = read_chat(await request.body(), requests.limits)
            await answer_chat(service, request, fields)

    return router


def read_completion(body: dict[str, Any], limits: RequestLimits) -> CompletionRequest:
    """Read prompts. Raises ApiError 400."""
    return parse_request(CompletionRequest, body, limits)


def prepare_completion(
    fields: CompletionRequest,
    model: Model,
    caller: Caller,
    *,
    id_prefix: str = "cmpl-",
    default_max_tokens: int | None = DEFAULT_MAX_TOKENS,
) -> Prepared:
    """Prepare plain prompts, as text or as ids. Raises ApiError."""
    texts = [prompt for prompt in fields.prompt if isinstance(prompt, str)]
    ids = [prompt for prompt in fields.prompt if isinstance(prompt, list)]
    return Prepared(
        request_id=new_id(id_prefix),
        model=model,
        fields=fields,
        prompt=tokenizer_pb2.CompletionInput(prompts=texts, add_special_tokens=fields.add_special_tokens)
        if texts
        else ids,
        prompt_param="prompt",
        caller=caller,
        default_max_tokens=default_max_tokens,
        scores_stop_token=True,
        wanted=wanted_of(fields),
    )


async def answer_completion(
    service: GenerationService, request: ActiveRequest, fields: CompletionRequest
) -> None:
    """Answer a completion. Raises ApiError before the answer has begun, ClientGone at any time."""
    prepared = prepare_completion(fields, request.admit(fields), request.caller)
    plan = await service.plan(prepared, request)
    async with service.run(plan, request) as running:
        await answer(running, CompletionWriter, request.call)


def completion_routes(service: GenerationService) -> Routes:
    router, requests = Routes(), service.requests

    @router.post(
        "/v1/completions",
        "Go on with a text",
        Completion,
        CompletionRequest,
        event=(Completion, ErrorEnvelope),
        fails=ASKS,
        limited=True,
    )
    async def completions(call: Call) -> None:
        async with requests.active(call) as request:
            fields = read_completion(await request.body(), requests.limits)
            await answer_completion(service, request, fields)

    return router


def tokenize_routes(service: GenerationService, prompts: PromptService) -> Routes:
    """Return the routes; tokenize and detokenize also under /v1."""
    router, requests = Routes(), service.requests

    async def tokenize(request: ActiveRequest, body: dict[str, Any]) -> Tokens:
        return await request.until_gone(prompts.tokenize(body, request.caller))

    async def detokenize(request: ActiveRequest, body: dict[str, Any]) -> TokensText:
        return await request.until_gone(prompts.detokenize(body, request.caller))

    async def render_chat(request: ActiveRequest, body: dict[str, Any]) -> RenderedRequest:
        chat = read_chat(body, requests.limits)
        prepared = prepare_chat(chat, requests.models.require(chat.model), request.caller)
        (prompt,) = rendered_requests(await service.plan(prepared, request))
        return prompt

    async def render_completion(request: ActiveRequest, body: dict[str, Any]) -> list[RenderedRequest]:
        fields = read_completion(body, requests.limits)
        prepared = prepare_completion(fields, requests.models.require(fields.model), request.caller)
        return rendered_requests(await service.plan(prepared, request))

    def add(
        paths: Paths,
        answer: Callable[[ActiveRequest, dict[str, Any]], Awaitable[Any]],
        summary: str,
        written: Any,
        *bodies: type[RequestModel],
    ) -> None:
        @router.post(paths, summary, written, *bodies, fails=ASKS, limited=False)
        async def route(call: Call) -> None:
            async with requests.active(call) as request:
                value = await answer(request, await request.body())
                # A million ids take long to write, and others wait for the loop.
                await send_json(call.send, await asyncio.to_thread(msgspec.json.encode, value))

    add(
        ("/tokenize", "/v1/tokenize"),
        tokenize,
        "Text or a chat to token ids",
        Tokens,
        TokenizeRequest,
        TokenizeChatRequest,
    )
    add(("/detokenize", "/v1/detokenize"), detokenize, "Token ids to text", TokensText, DetokenizeRequest)
    add(
        "/v1/chat/completions/render",
        render_chat,
        "The token ids that a chat becomes",
        RenderedRequest,
        ChatRequest,
    )
    add(
        "/v1/completions/render",
        render_completion,
        "The token ids that each prompt becomes",
        list[RenderedRequest],
        CompletionRequest,
    )
    return router
