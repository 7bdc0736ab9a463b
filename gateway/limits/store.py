"""Counters of limits: windows, debts and requests at work; the implementation in this process."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from limits import RateLimitItem
from limits.aio.storage import MemoryStorage, SlidingWindowCounterSupport
from limits.aio.strategies import SlidingWindowCounterRateLimiter


class StoreAway(Exception):
    """The store does not answer."""


@dataclass(frozen=True, slots=True)
class Window:
    """Use of a limit of `amount` in `length_s` seconds, counted in periods of that length.

    `current`: in this period; `previous`: in the one before, which counts by the share of it that the last
    `length_s` seconds still have. `current_left_s`, `previous_left_s`: until none of it counts any more."""

    amount: int
    length_s: float
    previous: int
    previous_left_s: float
    current: int
    current_left_s: float

    @property
    def remaining(self) -> int:
        """Amount that is left."""
        used = self.previous * self.previous_left_s / self.length_s + self.current
        return max(0, self.amount - math.floor(used))

    @property
    def reset_s(self) -> float:
        """Seconds until the whole amount is left again."""
        return self.current_left_s if self.current else self.previous_left_s if self.previous else 0.0

    def wait_s(self, cost: int) -> float:
        """Return the seconds until `cost`, at most `amount`, is left, if no other request uses any."""
        if self.remaining >= cost:
            return 0.0
        # A count is rounded down: less than this may be used.
        below = self.amount - cost + 1
        if self.current < below:
            return self.previous_left_s - (below - self.current) * self.length_s / self.previous
        return self.current_left_s - below * self.length_s / self.current


async def read_window(storage: SlidingWindowCounterSupport, item: RateLimitItem, *identifiers: str) -> Window:
    """Return what a storage has counted under a name."""
    length_s = item.get_expiry()
    counted = await storage.get_sliding_window(item.key_for(*identifiers), length_s)
    return Window(item.amount, length_s, *counted)


class Counters(Protocol):
    """Counters of the use of API keys. Every method may raise StoreAway, after a short timeout."""

    async def hit(self, item: RateLimitItem, name: str, owner: str, cost: int) -> bool:
        """Count `cost` if the window has so much left; return whether it had."""

    async def window(self, item: RateLimitItem, name: str, owner: str) -> Window:
        """Return the window of a limit."""

    async def owe(self, owner: str, tokens: int) -> None:
        """Add tokens that no window has counted to the owner's debt."""

    async def repay(self, owner: str, most: int) -> int:
        """Take up to `most` tokens off the owner's debt; return how many were taken."""

    async def enter(self, owner: str, request: str, most: int) -> bool:
        """Count a request in, unless `most` of the owner's are at work. If it raises, it may be counted."""

    async def leave(self, owner: str, request: str) -> None:
        """Count a request out. Idempotent."""

    async def renew(self) -> None:
        """Note that all requests that were counted in are still at work; called every few seconds."""

    async def close(self) -> None:
        """Close connections."""


class LocalCounters:
    """Counters in this process: two numbers for each window of a key, one for its debt, and its requests."""

    def __init__(self) -> None:
        self._storage = MemoryStorage()
        self._windows = SlidingWindowCounterRateLimiter(self._storage)
        self._owed: dict[str, int] = {}
        self._at_work: dict[str, set[str]] = {}

    async def hit(self, item: RateLimitItem, name: str, owner: str, cost: int) -> bool:
        return await self._windows.hit(item, name, owner, cost=cost)

    async def window(self, item: RateLimitItem, name: str, owner: str) -> Window:
        return await read_window(self._storage, item, name, owner)

    async def owe(self, owner: str, tokens: int) -> None:
        self._owed[owner] = self._owed.get(owner, 0) + tokens

    async def repay(self, owner: str, most: int) -> int:
        owed = self._owed.pop(owner, 0)
        if owed > most:
            self._owed[owner] = owed - most
        return min(owed, most)

    async def enter(self, owner: str, request: str, most: int) -> bool:
        at_work = self._at_work.setdefault(owner, set())
        if len(at_work) >= most:
            return False
        at_work.add(request)
        return True

    async def leave(self, owner: str, request: str) -> None:
        at_work = self._at_work.get(owner)
        if at_work is None:
            return
        at_work.discard(request)
        if not at_work:
            del self._at_work[owner]

    async def renew(self) -> None:
        pass

    async def close(self) -> None:
        pass
