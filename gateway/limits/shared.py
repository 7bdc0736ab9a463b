"""Counters in Redis, which several gateways share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from limits import RateLimitItem
from limits.aio.storage import RedisStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from limits.errors import StorageError
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.limits.store import StoreAway, Window, read_window

T = TypeVar("T")

PREFIX = "catenary-limits"
# A request at work counts for so long after its gateway's last renewal.
LEASE_S = 60.0
# A debt is dropped so long after it grew last.
_DEBT_S = 86_400

_ENTER = """
local now = tonumber(redis.call('TIME')[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[2]) then return 0 end
redis.call('ZADD', KEYS[1], now + tonumber(ARGV[3]), ARGV[1])
redis.call('EXPIRE', KEYS[1], tonumber(ARGV[3]))
return 1
"""
_REPAY = """
local taken = math.min(tonumber(redis.call('GET', KEYS[1]) or '0'), tonumber(ARGV[1]))
if taken > 0 and redis.call('DECRBY', KEYS[1], taken) <= 0 then redis.call('DEL', KEYS[1]) end
return taken
"""
_RENEW = """
local now = tonumber(redis.call('TIME')[1])
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], 'XX', now + tonumber(ARGV[1]), ARGV[i]) end
redis.call('EXPIRE', KEYS[1], tonumber(ARGV[1]))
return 0
"""


class SharedCounters:
    """Counters in Redis. A request at work is an entry that expires unless its gateway renews it, so that the
    requests of a gateway that dies do not count for ever.

    `timeout_s`: of each call. After one that failed, others fail at once for `pause_s`.
    """

    def __init__(self, url: str, *, timeout_s: float, pause_s: float = 1.0) -> None:
        """Prepare a client. Raise ValueError for a URL that is not one of Redis."""
        self._timeout_s = timeout_s
        self._pause_s = pause_s
        options: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
        self._redis = Redis.from_url(url, **options)
        # One pool for both, which `close` closes.
        pool: dict[str, Any] = {"connection_pool": self._redis.connection_pool}
        self._storage = RedisStorage(f"async+{url}", implementation="redispy", wrap_exceptions=True, **pool)
        self._windows = SlidingWindowCounterRateLimiter(self._storage)
        self._enter = self._redis.register_script(_ENTER)
        self._repay = self._redis.register_script(_REPAY)
        self._renew = self._redis.register_script(_RENEW)
        self._at_work: dict[str, set[str]] = {}
        self._away_until = 0.0

    async def hit(self, item: RateLimitItem, name: str, owner: str, cost: int) -> bool:
        return await self._ask(lambda: self._windows.hit(item, PREFIX, name, owner, cost=cost))

    async def window(self, item: RateLimitItem, name: str, owner: str) -> Window:
        return await self._ask(lambda: read_window(self._storage, item, PREFIX, name, owner))

    async def owe(self, owner: str, tokens: int) -> None:

        async def owe() -> None:
            async with self._redis.pipeline(transaction=True) as both:
                both.incrby(_debt(owner), tokens)
                both.expire(_debt(owner), _DEBT_S)
                await both.execute()

        await self._ask(owe)

    async def repay(self, owner: str, most: int) -> int:
        return int(await self._ask(lambda: self._repay(keys=[_debt(owner)], args=[most])))

    async def enter(self, owner: str, request: str, most: int) -> bool:
        # Noted before the call, whose answer may be lost: `leave` removes the entry then.
        self._at_work.setdefault(owner, set()).add(request)
        entered = await self._ask(lambda: self._enter(keys=[_key(owner)], args=[request, most, int(LEASE_S)]))
        if not entered:
            self._forget(owner, request)
        return bool(entered)

    async def leave(self, owner: str, request: str) -> None:
        if self._forget(owner, request):
            await self._ask(lambda: self._redis.zrem(_key(owner), request))

    async def renew(self) -> None:
        for owner, requests in list(self._at_work.items()):
            await self._ask(partial(self._renew, keys=[_key(owner)], args=[int(LEASE_S), *requests]))

    async def close(self) -> None:
        await self._redis.aclose()

    def _forget(self, owner: str, request: str) -> bool:
        at_work = self._at_work.get(owner)
        if at_work is None or request not in at_work:
            return False
        at_work.discard(request)
        if not at_work:
            del self._at_work[owner]
        return True

    async def _ask(self, call: Callable[[], Awaitable[T]]) -> T:
        loop = asyncio.get_running_loop()
        if loop.time() < self._away_until:
            raise StoreAway
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call()
        except (RedisError, StorageError, OSError, TimeoutError):
            self._away_until = loop.time() + self._pause_s
            raise StoreAway from None


def _key(owner: str) -> str:
    return f"{PREFIX}:at-work:{owner}"


def _debt(owner: str) -> str:
    return f"{PREFIX}:owed:{owner}"
