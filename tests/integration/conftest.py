"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.stack_fixtures import (
    parsing_tokenizer,
    shared_stack,
    stack,
    stack_in_a_thread,
    start_cluster,
    start_parsing,
    start_stack,
    tokenizer_target,
)
from tests.support.starts import Starts, forked_starts

__all__ = [
    "parsing_tokenizer",
    "shared_stack",
    "stack",
    "stack_in_a_thread",
    "start_cluster",
    "start_parsing",
    "start_stack",
    "tokenizer_target",
]


@pytest.fixture(scope="session")
def starts() -> Iterator[Starts]:
    """Starts of services that are refused."""
    with forked_starts() as made:
        yield made
