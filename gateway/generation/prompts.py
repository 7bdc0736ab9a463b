"""Requests that end at the prompt: tokenize, detokenize, and what a generating request becomes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from catenary.v1 import tokenizer_pb2
from gateway.auth import Caller, caller_of
from gateway.errors import ApiError, bad_request
from gateway.generation.chat import to_chat_input
from gateway.generation.service import Endpoint, GenerationService, T
from gateway.http.answers import send_json
from gateway.http.disconnect import ClientWatch
from gateway.schemas.chat import TokenizeChatRequest
from gateway.schemas.completion import DetokenizeRequest, TokenizeRequest
from gateway.schemas.validation import parse_request
from gateway.text.models import Model, ModelRegistry
from gateway.text.pool import TokenizerPool


class Tokens(msgspec.Struct):
    """A text's or a chat's tokens; their spellings if they were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokensText(msgspec.Struct):
    """The text of tokens."""

    prompt: str


class RenderedRequest(msgspec.Struct):
    """What an engine would be asked: a prompt's tokens, and how many may follow."""

    request_id: str
    model: str
    token_ids: Sequence[int]
    max_tokens: int


MANY_TOKENS = 5000

PromptHandler = Callable[[dict[str, Any], Caller], Coroutine[Any, Any, Any]]


class PromptService:
    """Answers them from the tokenizer services. Texts need no engine that serves the model just now."""

    def __init__(
        self, service: GenerationService, *, models: ModelRegistry, tokenizers: TokenizerPool
    ) -> None:
        self._service = service
        self._models = models
        self._tokenizers = tokenizers

    async def serve(self, handler: PromptHandler, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request with what `handler` makes of its body. Raises ApiError or ClientGone."""
        with self._service.place():
            body = await self._service.read(scope, receive)
            async with ClientWatch(receive) as watch:
                answer: Any = await watch.run(handler(body, caller_of(scope)))
                # A million ids take long to write, and others wait for the loop.
                await send_json(send, await asyncio.to_thread(msgspec.json.encode, answer))

    async def tokenize(self, body: dict[str, Any], caller: Caller) -> Tokens:
        """Ids of a text or of a chat. Raises ApiError."""
        if "messages" in body and "prompt" in body:
            raise bad_request("Only one of 'prompt' and 'messages' is allowed.", "prompt")
        limits = self._service.limits
        fields: TokenizeRequest | TokenizeChatRequest
        if "messages" in body:
            fields = parse_request(TokenizeChatRequest, body, limits)
            model = self._models.known(fields.model)
            chat = tokenizer_pb2.RenderRequest(
                model=model.name, tenant=caller.owner, chat=to_chat_input(fields, model.traits)
            )
            (ids,) = (await self._tokenizers.render(chat)).prompts
        else:
            fields = parse_request(TokenizeRequest, body, limits)
            model = self._models.known(fields.model)
            text = tokenizer_pb2.TokenizeRequest(
                model=model.name,
                tenant=caller.owner,
                text=fields.prompt,
                add_special_tokens=fields.add_special_tokens,
            )
            try:
                ids = await self._tokenizers.tokenize(text)
            except ApiError as error:
                # The tokenizer names the field of its own request.
                if error.status != 400:
                    raise
                raise bad_request(error.message, "prompt", error.code) from None
        spelled = await _spellings(model, ids) if fields.return_token_strs else None
        return Tokens(len(ids), model.max_model_len, ids, spelled)

    async def detokenize(self, body: dict[str, Any], caller: Caller) -> TokensText:
        """Text of ids, control tokens shown. Raises ApiError."""
        fields = parse_request(DetokenizeRequest, body, self._service.limits)
        model = self._models.known(fields.model)
        request = tokenizer_pb2.DetokenizeRequest(
            model=model.name, tenant=caller.owner, token_ids=fields.tokens
        )
        return TokensText(await self._tokenizers.detokenize(request))

    async def render(
        self, endpoint: Endpoint[T], body: dict[str, Any], caller: Caller
    ) -> list[RenderedRequest]:
        """What each prompt of a generating request becomes. Raises ApiError, as the request itself would."""
        fields = endpoint.parse(body, self._service.limits)
        plan, _ = await self._service.prepare(endpoint, fields, caller)
        return [
            RenderedRequest(plan.request_id, plan.model.asked, ids, limit)
            for ids, limit in zip(plan.prompts, plan.max_tokens, strict=True)
        ]


async def _spellings(model: Model, ids: list[int]) -> list[str]:
    if len(ids) < MANY_TOKENS:
        return model.vocabulary.spellings(ids)
    return await asyncio.to_thread(model.vocabulary.spellings, ids)
