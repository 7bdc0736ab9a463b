"""An order of a router to finish and end, and the time that is left for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class DrainOrder:
    """Given by any router, or by several: the earliest deadline counts. Times are of a steady clock."""

    def __init__(self, default_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._default_s = default_s
        self._clock = clock
        self._until: float | None = None
        self._changed = asyncio.Event()

    def give(self, deadline_s: float | None) -> None:
        """Finish within so many seconds; None: the engine's own time."""
        until = self._clock() + (self._default_s if deadline_s is None else deadline_s)
        if self._until is None or until < self._until:
            self._until = until
            self._changed.set()

    async def given(self) -> None:
        """Wait for an order."""
        await self._changed.wait()

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, 0 if it is over. Without an order, the engine's own time."""
        return self._default_s if self._until is None else max(0.0, self._until - self._clock())

    async def over(self) -> None:
        """Wait until the deadline has passed. It may come nearer meanwhile."""
        while (left := self.left_s) > 0:
            self._changed.clear()
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                return
