"""Waiting for conditions, never for luck."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

# Name of a thread whose logs nobody wants to see: tests/conftest.py drops them.
QUIET_THREAD = "stack-in-a-thread"


async def eventually(condition: Callable[[], object], what: str, *, timeout_s: float = 10.0) -> None:
    """Wait until `condition` is true. Raises AssertionError that says `what` did not come."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        await asyncio.sleep(0.005)
