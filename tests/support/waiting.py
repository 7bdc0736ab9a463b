"""Waiting for conditions, never for luck."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

# Name of a thread whose logs nobody wants to see: tests/conftest.py drops them.
QUIET_THREAD = "stack-in-a-thread"


def loop_beside_tests() -> asyncio.AbstractEventLoop:
    """A loop for that thread. gRPC lets any loop handle what is left of a test whose own loop is closed, and
    asyncio would log that it cannot, into whatever test runs then.
    """

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if str(context.get("exception")) != "Event loop is closed":
            loop.default_exception_handler(context)

    made = asyncio.new_event_loop()
    made.set_exception_handler(handle)
    return made


async def eventually(condition: Callable[[], object], what: str, *, timeout_s: float = 10.0) -> None:
    """Wait until `condition` is true. Raises AssertionError that says `what` did not come."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        await asyncio.sleep(0.005)
