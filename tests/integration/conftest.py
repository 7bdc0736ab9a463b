"""Fixtures of the integration tests."""

from __future__ import annotations

from tests.support.stack_fixtures import (
    parsing_tokenizer,
    stack,
    start_cluster,
    start_parsing,
    start_stack,
    tokenizer_target,
)

__all__ = ["parsing_tokenizer", "stack", "start_cluster", "start_parsing", "start_stack", "tokenizer_target"]
