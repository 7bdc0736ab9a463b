"""Where limits are counted: in this process, or in Redis for all gateways together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from limits import RateLimitItem
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter


class StoreAway(Exception):
    """The store does not answer."""


@dataclass(frozen=True, slots=True)
class Window:
    """What is left in a window, and the Unix time at which it is whole again."""

    remaining: int
    reset_time: float


class Counters(Protocol):
    """Counts what keys use. Every method may raise StoreAway, soon."""

    async def hit(self, item: RateLimitItem, name: str, owner: str, cost: int) -> bool:
        """Count `cost` if the window has so much left, and tell whether it had."""

    async def window(self, item: RateLimitItem, name: str, owner: str) -> Window:
        """What is left."""

    async def owe(self, owner: str, tokens: int) -> None:
        """The owner has used so many that no window has counted."""

    async def repay(self, owner: str, most: int) -> int:
        """Take `most` at the most from what is owed; how many were taken."""

    async def enter(self, owner: str, request: str, most: int) -> bool:
        """Count a request in, unless `most` of the owner's are at work. If it raises, it may be counted."""

    async def leave(self, owner: str, request: str) -> None:
        """Count it out. Idempotent."""

    async def renew(self) -> None:
        """Called every few seconds: say that what is counted in is still at work."""

    async def close(self) -> None:
        """Let go of what is held."""


class LocalCounters:
    """In this process: a window takes two numbers for each key, a debt one, a request at work one entry."""

    def __init__(self) -> None:
        self._windows = SlidingWindowCounterRateLimiter(MemoryStorage())
        self._owed: dict[str, int] = {}
        self._at_work: dict[str, set[str]] = {}

    async def hit(self, item: RateLimitItem, name: str, owner: str, cost: int) -> bool:
        """See Counters."""
        return await self._windows.hit(item, name, owner, cost=cost)

    async def window(self, item: RateLimitItem, name: str, owner: str) -> Window:
        """See Counters."""
        stats = await self._windows.get_window_stats(item, name, owner)
        return Window(stats.remaining, stats.reset_time)

    async def owe(self, owner: str, tokens: int) -> None:
        """See Counters."""
        self._owed[owner] = self._owed.get(owner, 0) + tokens

    async def repay(self, owner: str, most: int) -> int:
        """See Counters."""
        owed = self._owed.pop(owner, 0)
        if owed > most:
            self._owed[owner] = owed - most
        return min(owed, most)

    async def enter(self, owner: str, request: str, most: int) -> bool:
        """See Counters."""
        at_work = self._at_work.setdefault(owner, set())
        if len(at_work) >= most:
            return False
        at_work.add(request)
        return True

    async def leave(self, owner: str, request: str) -> None:
        """See Counters."""
        at_work = self._at_work.get(owner)
        if at_work is None:
            return
        at_work.discard(request)
        if not at_work:
            del self._at_work[owner]

    async def renew(self) -> None:
        """See Counters."""

    async def close(self) -> None:
        """See Counters."""
