"""Requests that end at the prompt: tokenize, detokenize and render."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from catenary.v1 import tokenizer_pb2
from gateway.auth import Caller
from gateway.errors import ApiError, bad_request
from gateway.generation.chat import to_chat_input
from gateway.generation.plan import GenerationPlan
from gateway.generation.requests import Requests
from gateway.schemas.base import parse_request
from gateway.schemas.chat import TokenizeChatRequest
from gateway.schemas.completion import DetokenizeRequest, TokenizeRequest
from gateway.text.models import Model
from gateway.text.pool import TokenizerPool


class Tokens(msgspec.Struct):
    """A text's or a chat's tokens; their spellings if they were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokensText(msgspec.Struct):
    """Answer to token ids: their text."""

    prompt: str


class RenderedRequest(msgspec.Struct):
    """Request to an engine as it would be sent: a prompt's tokens, and how many may follow."""

    request_id: str
    model: str
    token_ids: Sequence[int]
    max_tokens: int


MANY_TOKENS = 5000


class PromptService:
    """Answers from the tokenizer services. Texts need no engine that serves the model just now."""

    def __init__(self, requests: Requests, tokenizers: TokenizerPool) -> None:
        self._limits = requests.limits
        self._models = requests.models
        self._tokenizers = tokenizers

    async def tokenize(self, body: dict[str, Any], caller: Caller) -> Tokens:
        """Return the ids of a text or of a chat. Raises ApiError."""
        if "messages" in body and "prompt" in body:
            raise bad_request("Only one of 'prompt' and 'messages' is allowed.", "prompt")
        limits = self._limits
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
        """Return the text of ids, control tokens shown. Raises ApiError."""
        fields = parse_request(DetokenizeRequest, body, self._limits)
        model = self._models.known(fields.model)
        request = tokenizer_pb2.DetokenizeRequest(
            model=model.name, tenant=caller.owner, token_ids=fields.tokens
        )
        return TokensText(await self._tokenizers.detokenize(request))


def rendered_requests(plan: GenerationPlan) -> list[RenderedRequest]:
    """Return the rendered request of each prompt of a plan."""
    return [
        RenderedRequest(plan.request_id, plan.model.asked, ids, limit)
        for ids, limit in zip(plan.prompts, plan.max_tokens, strict=True)
    ]


async def _spellings(model: Model, ids: list[int]) -> list[str]:
    if len(ids) < MANY_TOKENS:
        return model.vocabulary.spellings(ids)
    return await asyncio.to_thread(model.vocabulary.spellings, ids)
