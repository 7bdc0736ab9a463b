"""Telling a router that is silent from one that this process did not listen to."""

from __future__ import annotations

import asyncio

_LOOKS = 4


class Silence:
    """Measures how long nothing was heard. A time in which this process itself stood still does not count:
    what came meanwhile is not read yet."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._heard = self._loop.time()

    def heard(self) -> None:
        """Something came."""
        self._heard = self._loop.time()

    async def wait(self) -> None:
        """Return once nothing was heard for `limit_s` seconds."""
        look_s = self.limit_s / _LOOKS
        while (left := self._heard + self.limit_s - self._loop.time()) > 0:
            due = self._loop.time() + min(left, look_s)
            await asyncio.sleep(min(left, look_s))
            if self._loop.time() - due > look_s:
                self.heard()
