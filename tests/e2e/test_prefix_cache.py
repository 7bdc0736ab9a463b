"""Prompts that begin alike, through gateway, router and engine: what usage says about the prefix cache."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.e2e_stack import ProcessStack
from tests.support.http import call

pytestmark = pytest.mark.model

MODEL = "SmolLM2-135M-Instruct"
BLOCK = 32
# No other test asks this, and its first block is full of it.
STORY = "The lighthouse keeper counted the ships that passed, and wrote each name into a book. " * 6


async def usage_of(stack: ProcessStack, question: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": STORY + question}],
        "max_tokens": 8,
        "temperature": 0,
        **fields,
    }
    answer = (await call(stack.address, "POST", "/v1/chat/completions", body)).json()
    return answer["choices"][0]["message"]["content"], answer["usage"]


async def test_usage_tells_how_much_of_a_prompt_was_cached(stack: ProcessStack) -> None:
    cold, usage = await usage_of(stack, "Why?")
    # The template's own beginning may have been cached by others.
    assert usage["prompt_tokens_details"]["cached_tokens"] <= BLOCK
    warm, again = await usage_of(stack, "Why?")
    tokens = usage["prompt_tokens"]
    assert again["prompt_tokens"] == tokens > 3 * BLOCK
    assert again["prompt_tokens_details"] == {"cached_tokens": (tokens - 1) // BLOCK * BLOCK}
    assert warm == cold
    _, other = await usage_of(stack, "Where was that, and who sailed there in the end?")
    assert 3 * BLOCK <= other["prompt_tokens_details"]["cached_tokens"] < other["prompt_tokens"]
    # Two samples of one prompt count its cached tokens once, as they do its tokens.
    _, twice = await usage_of(stack, "Why?", n=2, temperature=1)
    assert twice["prompt_tokens"] == tokens
    assert twice["prompt_tokens_details"] == again["prompt_tokens_details"]
