"""What requests that end at the prompt are answered with."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


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
