"""Limits of keys, counted in this process and in Redis, and what happens while Redis is away."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fakeredis import TcpFakeServer
from limits import RateLimitItem
from redis.asyncio import Connection
from redis.commands.core import AsyncScript

from gateway.errors import ApiError
from gateway.limits.limiter import Allowance, KeyLimits, Limiter
from gateway.limits.shared import SharedCounters
from gateway.limits.store import LocalCounters, StoreAway, Window
from tests.support.minutes import StoppedClock, stop_the_clock


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    server = TcpFakeServer(("127.0.0.1", 0), server_type="redis")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"redis://127.0.0.1:{server.server_address[1]}/0"
    server.shutdown()
    server.server_close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StoppedClock:
    return stop_the_clock(monkeypatch)


@pytest.fixture(params=["here", "redis"])
def counters(request: pytest.FixtureRequest, clock: StoppedClock) -> SharedCounters | None:
    if request.param == "here":
        return None
    return SharedCounters(request.getfixturevalue("redis_url"), timeout_s=5)


async def refused(limiter: Limiter, owner: str, request: str = "r") -> ApiError:
    with pytest.raises(ApiError) as caught:
        await limiter.enter(owner, request)
    return caught.value


def told(allowance: Allowance) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in allowance.headers}


async def test_requests_in_a_minute(counters: SharedCounters | None) -> None:
    limiter = Limiter(KeyLimits(requests_per_minute=2), counters)
    headers = told(await limiter.enter("requests-a", "1"))
    assert headers["x-ratelimit-limit-requests"] == "2"
    assert headers["x-ratelimit-remaining-requests"] == "1"
    assert headers["x-ratelimit-reset-requests"].endswith("s")
    await limiter.enter("requests-a", "2")
    error = await refused(limiter, "requests-a")
    assert (error.status, error.code) == (429, "rate_limit_exceeded")
    assert "2 requests of this minute (key-requests-per-minute)" in error.message
    assert 1000 <= (error.retry_after_ms or 0) <= 60_000
    assert ("x-ratelimit-remaining-requests", "0") in error.extra_headers
    # Another key is not touched.
    await limiter.enter("requests-b", "1")
    await limiter.close()


async def test_tokens_of_prompts_and_answers(counters: SharedCounters | None) -> None:
    limiter = Limiter(KeyLimits(tokens_per_minute=100), counters)
    allowance = await limiter.enter("tokens-a", "1")
    assert told(allowance)["x-ratelimit-remaining-tokens"] == "100"
    await allowance.spend(30)
    assert told(allowance)["x-ratelimit-remaining-tokens"] == "70"
    allowance.charge(50)
    await asyncio.wait_for(limiter.flush(), 10)
    with pytest.raises(ApiError) as caught:
        await (await limiter.enter("tokens-a", "2")).spend(30)
    assert (caught.value.status, "key-tokens-per-minute" in caught.value.message) == (429, True)
    # More than there ever is.
    with pytest.raises(ApiError) as caught:
        await (await limiter.enter("tokens-b", "3")).spend(101)
    assert ("101 tokens" in caught.value.message, caught.value.code) == (True, "exceeds_key_limit")
    # A request that is tried again has the same prompt.
    again = await limiter.enter("tokens-c", "4")
    for _ in range(3):
        await again.spend(40)
    assert told(again)["x-ratelimit-remaining-tokens"] == "60"
    await limiter.close()


async def test_a_request_that_is_tried_again_is_begun_once(
    counters: SharedCounters | None, clock: StoppedClock
) -> None:
    limiter = Limiter(KeyLimits(requests_per_minute=2, tokens_per_minute=100, concurrent=1), counters)
    await (await limiter.enter("tries", "1")).spend(90)
    await limiter.leave("tries", "1")
    waits = await limiter.enter("tries", "2")
    for _ in range(3):
        with pytest.raises(ApiError, match="tokens"):
            await waits.spend(20)
        await limiter.leave("tries", "2")
        assert await limiter.enter("tries", "2", waits) is waits
    # It is at work nevertheless.
    with pytest.raises(ApiError, match="at work"):
        await limiter.enter("tries", "3", waits)
    clock.later(180)
    await waits.spend(20)
    assert told(waits)["x-ratelimit-remaining-tokens"] == "80"
    await limiter.close()


async def test_what_an_answer_has_beyond_its_minute_is_owed(
    counters: SharedCounters | None, clock: StoppedClock
) -> None:
    limiter = Limiter(KeyLimits(tokens_per_minute=100), counters)
    long = await limiter.enter("debt", "1")
    await long.spend(10)
    long.charge(250)
    await asyncio.wait_for(limiter.flush(), 10)
    assert told(await limiter.enter("debt", "2"))["x-ratelimit-remaining-tokens"] == "0"
    clock.later(180)
    with pytest.raises(ApiError) as caught:
        await (await limiter.enter("debt", "3")).spend(1)
    assert caught.value.status == 429
    # 60 are left of the debt.
    clock.later(180)
    await (await limiter.enter("debt", "4")).spend(39)
    clock.later(180)
    await (await limiter.enter("debt", "5")).spend(100)
    await limiter.close()


async def test_requests_at_work(counters: SharedCounters | None) -> None:
    limiter = Limiter(KeyLimits(concurrent=2), counters)
    await limiter.enter("work-a", "1")
    await limiter.enter("work-a", "2")
    error = await refused(limiter, "work-a", "3")
    assert (error.status, "key-concurrent" in error.message) == (429, True)
    await limiter.leave("work-a", "1")
    await limiter.leave("work-a", "1")
    await limiter.leave("work-a", "never came")
    await limiter.enter("work-a", "3")
    assert (await refused(limiter, "work-a", "4")).status == 429
    for request in ("2", "3"):
        await limiter.leave("work-a", request)
    await limiter.close()


async def test_what_too_many_at_work_refuse_costs_nothing_of_the_minute(
    counters: SharedCounters | None,
) -> None:
    limiter = Limiter(KeyLimits(requests_per_minute=2, tokens_per_minute=100, concurrent=1), counters)
    await limiter.enter("work-b", "1")
    for request in ("2", "3"):
        error = await refused(limiter, "work-b", request)
        assert "key-concurrent" in error.message
        assert ("x-ratelimit-remaining-requests", "1") in error.extra_headers
        assert ("x-ratelimit-remaining-tokens", "100") in error.extra_headers
    await limiter.leave("work-b", "1")
    # A request that the minute refuses is not at work.
    await limiter.enter("work-b", "4")
    await limiter.leave("work-b", "4")
    for request in ("5", "6"):
        assert "key-requests-per-minute" in (await refused(limiter, "work-b", request)).message
    await limiter.close()


async def test_an_owner_may_have_limits_of_its_own(counters: SharedCounters | None) -> None:
    common = KeyLimits(requests_per_minute=1, tokens_per_minute=50, concurrent=1)
    own = {"own-a": KeyLimits(requests_per_minute=3, concurrent=2), "own-b": KeyLimits()}
    limiter = Limiter(common, counters, own=own)
    first = await limiter.enter("own-a", "1")
    assert told(first)["x-ratelimit-limit-requests"] == "3"
    await first.spend(1_000)
    first.charge(1_000)
    await limiter.enter("own-a", "2")
    assert "limit of 2 requests at work" in (await refused(limiter, "own-a", "3")).message
    for number in range(5):
        assert told(await limiter.enter("own-b", str(number))) == {}
    await limiter.enter("other", "1")
    assert (await refused(limiter, "other", "2")).status == 429
    for owner, request in (("own-a", "1"), ("own-a", "2"), ("other", "1")):
        await limiter.leave(owner, request)
    await limiter.close()


class OnceAway(LocalCounters):
    """Its windows are away once; `cause` is raised."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__()
        self.cause: BaseException | None = cause

    async def window(self, item: RateLimitItem, name: str, owner: str) -> Window:
        """See Counters."""
        cause, self.cause = self.cause, None
        if cause is not None:
            raise cause
        return await super().window(item, name, owner)


@pytest.mark.parametrize("cause", [StoreAway(), asyncio.CancelledError()])
async def test_who_is_not_let_in_takes_no_place(cause: BaseException) -> None:
    limits = KeyLimits(tokens_per_minute=100, concurrent=1, refuse_when_away=True)
    limiter = Limiter(limits, OnceAway(cause))
    with pytest.raises((ApiError, asyncio.CancelledError)):
        await limiter.enter("out", "1")
    await limiter.enter("out", "2")
    await limiter.close()


async def test_a_place_whose_answer_was_lost_is_given_back(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = SharedCounters(redis_url, timeout_s=5)
    limiter = Limiter(KeyLimits(concurrent=1), counters)
    answered = AsyncScript.__call__

    async def lost(*arguments: Any, **options: Any) -> None:
        await answered(*arguments, **options)
        raise asyncio.CancelledError

    monkeypatch.setattr(AsyncScript, "__call__", lost)
    with pytest.raises(asyncio.CancelledError):
        await limiter.enter("lost", "1")
    monkeypatch.undo()
    await limiter.enter("lost", "2")
    await limiter.leave("lost", "2")
    await limiter.close()


async def test_all_connections_are_closed(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Connection] = []
    connect = Connection.connect

    async def noted(connection: Connection) -> None:
        made.append(connection)
        await connect(connection)

    monkeypatch.setattr(Connection, "connect", noted)
    counters = SharedCounters(redis_url, timeout_s=5)
    limiter = Limiter(KeyLimits(requests_per_minute=5, concurrent=5), counters)
    await limiter.enter("closed", "1")
    assert any(connection.is_connected for connection in made)
    await limiter.close()
    assert not any(connection.is_connected for connection in made)


async def test_gateways_count_together_and_a_dead_one_takes_nothing_with_it(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = KeyLimits(requests_per_minute=3, concurrent=2)
    counted = [SharedCounters(redis_url, timeout_s=5) for _ in range(2)]
    first, second = (Limiter(limits, counters) for counters in counted)
    await first.enter("both", "1")
    await second.enter("both", "2")
    assert "key-concurrent" in (await refused(first, "both", "3")).message
    await first.leave("both", "1")
    await first.enter("both", "5")
    await first.leave("both", "5")
    assert "key-requests-per-minute" in (await refused(second, "both", "4")).message
    await counted[0].enter("both", "1", 2)
    monkeypatch.setattr("gateway.limits.shared.LEASE_S", 1.0)
    for counters in counted:
        await counters.renew()
    monkeypatch.undo()
    # Nobody renews: both count as dead, and their places are free.
    other = SharedCounters(redis_url, timeout_s=5)
    async with asyncio.timeout(10):
        while not await other.enter("both", "5", 2):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await other.renew()
    assert not await other.enter("both", "6", 1)
    for one in (first, second):
        await one.close()
    await other.close()


@pytest.mark.parametrize("refuse", [False, True])
async def test_redis_away_is_no_defect_and_no_hang(refuse: bool, clock: StoppedClock) -> None:
    counters = SharedCounters("redis://127.0.0.1:1/0", timeout_s=0.2, pause_s=60)
    limits = KeyLimits(requests_per_minute=2, tokens_per_minute=50, concurrent=1, refuse_when_away=refuse)
    limiter = Limiter(limits, counters)
    if refuse:
        error = await refused(limiter, "a")
        assert (error.status, error.code) == (503, "limits_unavailable")
        assert error.retry_after_ms
    else:
        await (await limiter.enter("a", "1")).spend(50)
        assert (await refused(limiter, "a", "2")).status == 429
    await limiter.leave("a", "1")
    await limiter.close()


def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="URL"):
        SharedCounters("http://127.0.0.1", timeout_s=1)
