"""What a client gives back."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a sequence; `cached_tokens` are those of the prompt whose KV came from the prefix cache, None
    where a stop string ended it before the engine told."""

    prompt_tokens: int
    cached_tokens: int | None
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of an answer, and the tokens that came with it. The last one has why it ended, "stop" or
    "length", and the usage."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. `token_ids` are all that were generated, a stop token included."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
