"""Fixtures of the compatibility tests."""

from __future__ import annotations

from tests.support.stack_fixtures import (
    parsing_tokenizer,
    shared_stack,
    stack,
    stack_in_a_thread,
    start_parsing,
    start_stack,
    tokenizer_target,
)

__all__ = [
    "parsing_tokenizer",
    "shared_stack",
    "stack",
    "stack_in_a_thread",
    "start_parsing",
    "start_stack",
    "tokenizer_target",
]
