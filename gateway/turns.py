"""Long work on the event loop, cut into turns between which everything else has its own."""

from __future__ import annotations

import asyncio
import time

TURN_S = 0.002
"""Seconds after which work lets others have the loop."""


class Turns:
    """The turns of one piece of work, whose author awaits `between` after each short step."""

    def __init__(self) -> None:
        self._until = time.perf_counter() + TURN_S

    async def between(self) -> None:
        """Let the loop go round once if this turn has lasted long enough."""
        if time.perf_counter() < self._until:
            return
        await asyncio.sleep(0)
        self._until = time.perf_counter() + TURN_S
