"""Fixtures of the integration tests."""

from __future__ import annotations

from tests.support.stack_fixtures import stack, start_stack, tokenizer_target

__all__ = ["stack", "start_stack", "tokenizer_target"]
