"""Fixtures of the tests of surroundings: disks that are full or read-only, and the like."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.support.small_disk import SmallDisk, mounted
from tests.support.stack_fixtures import start_stack, tokenizer_target

__all__ = ["start_stack", "tokenizer_target"]


@pytest.fixture
def small_disk() -> Iterator[Callable[..., SmallDisk]]:
    """Mounts disks of so many bytes, as `small_disk(size)`; options of mount(8) may follow. Skips the test,
    with the reason, where none can be mounted."""
    with ExitStack() as disks:
        yield lambda size, *options: disks.enter_context(mounted(size, *options))
