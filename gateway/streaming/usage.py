"""The `usage` object of all answers."""

from __future__ import annotations

import msgspec


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct, omit_defaults=True):
    """Prompts are counted once however many choices they have; completions are summed over the choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


def usage_of(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int | None = None,
    reasoning_tokens: int | None = None,
) -> Usage:
    """Usage with its sum. None: not known, and left out."""
    return Usage(
        prompt_tokens,
        completion_tokens,
        prompt_tokens + completion_tokens,
        None if cached_tokens is None else PromptTokensDetails(cached_tokens),
        None if reasoning_tokens is None else CompletionTokensDetails(reasoning_tokens),
    )
