"""Limits of API keys: requests are admitted, or refused with a time to retry; headers report the rest."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from limits import RateLimitItemPerMinute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from catenary.config import ConfigError
from catenary.telemetry import get_logger, new_id
from gateway.auth import Allowance, HeaderList, caller_of, owner_name, read_key_file, set_caller
from gateway.config import GatewayConfig
from gateway.errors import ApiError, overloaded, unavailable
from gateway.http.answers import send_error
from gateway.limits.store import Counters, LocalCounters, StoreAway, Window

_log = get_logger(__name__)
T = TypeVar("T")


@dataclass(slots=True)
class Tried:
    """Request that is tried until it is answered, under COUNTED in its ASGI scopes.

    `allowance`: set once it was counted; further attempts are not counted again."""

    allowance: Allowance | None = None


COUNTED = "catenary.counted"

_REQUESTS, _TOKENS = "requests", "tokens"
LIMIT_HEADERS = tuple(
    f"x-ratelimit-{what}-{name}" for name in (_REQUESTS, _TOKENS) for what in ("limit", "remaining", "reset")
)
RENEW_S = 20.0
BEYOND_ITS_KEY = "exceeds_key_limit"
"""Error code of a request that is refused in every minute."""
_MINUTE_MS = 60_000


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of each key; 0 is none.

    `refuse_when_away`: while the shared store is away, answer 503 instead of counting in this process."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent: int = 0
    refuse_when_away: bool = False

    def __bool__(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute or self.concurrent)


class _Applied:
    def __init__(self, limits: KeyLimits) -> None:
        self.concurrent = limits.concurrent
        amounts = {_REQUESTS: limits.requests_per_minute, _TOKENS: limits.tokens_per_minute}
        self.windows = {name: RateLimitItemPerMinute(most) for name, most in amounts.items() if most}


class Limiter:
    """Counter of requests and tokens. `counters` None: in this process. `own`: limits of single owners."""

    def __init__(
        self,
        limits: KeyLimits,
        counters: Counters | None = None,
        *,
        own: Mapping[str, KeyLimits] | None = None,
    ) -> None:
        self._refuse_when_away = limits.refuse_when_away
        self._common = _Applied(limits)
        self._own = {owner: _Applied(theirs) for owner, theirs in (own or {}).items()}
        self._local = LocalCounters()
        self._counters: Counters = counters or self._local
        # Generated tokens that are not counted yet.
        self._charges: dict[str, int] = {}
        self._charging: asyncio.Task[None] | None = None
        self._away = False

    async def enter(self, owner: str, request: str, counted: Allowance | None = None) -> Allowance:
        """Admit a request; `counted`: another attempt, which counts as being at work alone.

        Raise ApiError: the key has too many requests in this minute, or at work (429), or the shared store is
        away and `refuse_when_away` is set (503). After an error or a cancel the request is not at work."""
        allowance = counted or Allowance(
            lambda tokens, headers: self._spend(owner, tokens, headers), self._later(owner)
        )
        try:
            await self._enter(owner, request)
            if counted is None:
                await self._begin(owner, allowance.headers)
        except BaseException:
            await self.leave(owner, request)
            raise
        return allowance

    async def leave(self, owner: str, request: str) -> None:
        """Count a request as ended. Idempotent; never raises."""
        if not self._of(owner).concurrent:
            return
        # Locally first: the call to the store may be cancelled.
        await self._local.leave(owner, request)
        try:
            await self._counters.leave(owner, request)
        except StoreAway:
            self._note(away=True)

    async def run(self) -> None:
        """Renew the requests at work, until cancelled."""
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                await self._counters.renew()
            except StoreAway:
                self._note(away=True)

    async def flush(self) -> None:
        """Wait until the generated tokens that are charged so far are counted."""
        if self._charging is not None:
            await self._charging

    async def close(self) -> None:
        """Close the store, once nothing is at work."""
        await self.flush()
        await self._counters.close()

    def _of(self, owner: str) -> _Applied:
        return self._own.get(owner, self._common)

    async def _enter(self, owner: str, request: str) -> None:
        most = self._of(owner).concurrent
        if most and not await self._ask(lambda at: at.enter(owner, request, most)):
            # The refused request is not counted in the key's minute.
            headers: HeaderList = []
            for name in self._of(owner).windows:
                headers += await self._left(name, owner)
            raise _with(
                headers,
                overloaded(f"This API key has its limit of {most} requests at work (key-concurrent)."),
            )

    async def _begin(self, owner: str, headers: HeaderList) -> None:
        windows = self._of(owner).windows
        if _REQUESTS in windows:
            await self._count(_REQUESTS, owner, 1, headers)
        if _TOKENS in windows:
            # The prompt's tokens are not known yet.
            headers += await self._left(_TOKENS, owner)

    async def _spend(self, owner: str, tokens: int, headers: HeaderList) -> None:
        if _TOKENS in self._of(owner).windows:
            headers[:] = [header for header in headers if not header[0].endswith(b"-tokens")]
            free = await self._ask(partial(self._settle, owner))
            await self._count(_TOKENS, owner, tokens, headers, free=free)

    async def _left(self, name: str, owner: str) -> HeaderList:
        item = self._of(owner).windows[name]
        return _headers_of(name, item.amount, await self._ask(lambda at: at.window(item, name, owner)))

    async def _count(
        self, name: str, owner: str, cost: int, headers: HeaderList, *, free: bool = True
    ) -> None:
        item = self._of(owner).windows[name]
        limit = item.amount
        if cost > limit:
            raise overloaded(
                f"The request has {cost} {name}, more than this API key may use in a minute, {limit} "
                f"(key-{name}-per-minute).",
                retry_after_ms=_MINUTE_MS,
                code=BEYOND_ITS_KEY,
            )
        allowed = free and await self._ask(lambda at: at.hit(item, name, owner, cost))
        window = await self._ask(lambda at: at.window(item, name, owner))
        headers += _headers_of(name, limit, window)
        if not allowed:
            raise _refused(name, limit, window.wait_s(cost), headers)

    def _later(self, owner: str) -> Callable[[int], None] | None:
        if _TOKENS not in self._of(owner).windows:
            return None

        def charge(tokens: int) -> None:
            self._charges[owner] = self._charges.get(owner, 0) + tokens
            if self._charging is None or self._charging.done():
                self._charging = asyncio.get_running_loop().create_task(self._charge())

        return charge

    async def _charge(self) -> None:
        """Count generated tokens, owner by owner."""
        while self._charges:
            owner, tokens = self._charges.popitem()
            try:
                await self._ask(partial(self._owe, owner, tokens))
            except ApiError:
                continue

    async def _owe(self, owner: str, tokens: int, counters: Counters) -> None:
        await counters.owe(owner, tokens)
        await self._settle(owner, counters)

    async def _settle(self, owner: str, counters: Counters) -> bool:
        """Pay the owner's debt from the rest of the window; return whether the window has more.

        An unpaid rest is left for the next minutes."""
        item = self._of(owner).windows[_TOKENS]
        left = (await counters.window(item, _TOKENS, owner)).remaining
        taken = await counters.repay(owner, left) if left else 0
        if taken and not await counters.hit(item, _TOKENS, owner, taken):
            # Other requests have used it meanwhile.
            await counters.owe(owner, taken)
            return False
        return taken < left

    async def _ask(self, call: Callable[[Counters], Awaitable[T]]) -> T:
        try:
            found = await call(self._counters)
        except StoreAway:
            self._note(away=True)
            if self._refuse_when_away:
                raise unavailable(
                    "The limits of API keys cannot be checked at the moment.", code="limits_unavailable"
                ) from None
            return await call(self._local)
        self._note(away=False)
        return found

    def _note(self, *, away: bool) -> None:
        if away != self._away:
            self._away = away
            _log.warning("the store of limits is away" if away else "the store of limits answers again")


def _headers_of(name: str, limit: int, window: Window) -> HeaderList:
    values = {"limit": str(limit), "remaining": str(window.remaining), "reset": f"{window.reset_s:.3f}s"}
    return [(f"x-ratelimit-{what}-{name}".encode(), value.encode()) for what, value in values.items()]


def _with(headers: HeaderList, error: ApiError) -> ApiError:
    error.extra_headers += tuple((key.decode(), value.decode()) for key, value in headers)
    return error


def _refused(name: str, limit: int, wait_s: float, headers: HeaderList) -> ApiError:
    after_ms = max(1000, math.ceil(wait_s * 1000))
    text = f"This API key has used its {limit} {name} of this minute (key-{name}-per-minute)."
    return _with(headers, overloaded(text, retry_after_ms=after_ms))


class LimitGate:
    """ASGI middleware behind the one that checks keys; it adds the headers of limits to answers."""

    def __init__(self, app: ASGIApp, limiter: Limiter, paths: Collection[str]) -> None:
        """Wrap `app`. `paths`: those of which a POST is counted."""
        self._app = app
        self._limiter = limiter
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        caller, request = caller_of(scope), new_id("at-")
        tried: Tried = scope.get(COUNTED) or Tried()
        try:
            allowance = await self._limiter.enter(caller.owner, request, tried.allowance)
        except ApiError as refusal:
            await send_error(send, refusal)
            return
        set_caller(scope, replace(caller, allowance=allowance))
        tried.allowance = allowance

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name for name, _ in message.get("headers", ())}
                more = [header for header in allowance.headers if header[0] not in names]
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            await self._limiter.leave(caller.owner, request)


def limiter_of(config: GatewayConfig) -> Limiter | None:
    """Make the limiter; None if no limit is set. Raise StartRefused for a bad store or a bad file of keys."""
    limits = KeyLimits(
        requests_per_minute=config.key_requests_per_minute,
        tokens_per_minute=config.key_tokens_per_minute,
        concurrent=config.key_concurrent,
        refuse_when_away=config.limits_store_away == "refuse",
    )
    keys = {} if config.api_key_file is None else read_key_file(config.api_key_file)
    own = {owner_name(key.encode()): _own(limits, given) for key, given in keys.items() if given}
    if not (limits or any(own.values())):
        return None
    if config.limits_store is None:
        return Limiter(limits, own=own)
    # Redis is imported only where it is used: it is large.
    from gateway.limits.shared import SharedCounters  # noqa: PLC0415

    try:
        counters = SharedCounters(config.limits_store, timeout_s=config.limits_store_timeout_s)
    except ValueError:
        raise ConfigError("--limits-store: must be redis://HOST:PORT/DB") from None
    return Limiter(limits, counters, own=own)


def _own(common: KeyLimits, given: Mapping[str, int]) -> KeyLimits:
    return KeyLimits(
        requests_per_minute=given.get("requests_per_minute", common.requests_per_minute),
        tokens_per_minute=given.get("tokens_per_minute", common.tokens_per_minute),
        concurrent=given.get("concurrent", common.concurrent),
        refuse_when_away=common.refuse_when_away,
    )
