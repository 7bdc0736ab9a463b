"""Limits of keys, counted in this process and in Redis, and what happens while Redis is away."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from fakeredis import TcpFakeServer

from gateway.errors import ApiError
from gateway.limits import Allowance, KeyLimits, Limiter
from gateway.limits.shared import SharedCounters


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    server = TcpFakeServer(("127.0.0.1", 0), server_type="redis")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"redis://127.0.0.1:{server.server_address[1]}/0"
    server.shutdown()
    server.server_close()


@pytest.fixture(params=["here", "redis"])
def counters(request: pytest.FixtureRequest) -> SharedCounters | None:
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
    await asyncio.wait_for(limiter._charging, 10)  # type: ignore[arg-type]
    with pytest.raises(ApiError) as caught:
        await (await limiter.enter("tokens-a", "2")).spend(30)
    assert (caught.value.status, "key-tokens-per-minute" in caught.value.message) == (429, True)
    # More than there ever is.
    with pytest.raises(ApiError) as caught:
        await (await limiter.enter("tokens-b", "3")).spend(101)
    assert "101 tokens" in caught.value.message
    # A long answer uses up what is left, and no more.
    long = await limiter.enter("tokens-c", "4")
    await long.spend(10)
    long.charge(10_000)
    await asyncio.wait_for(limiter._charging, 10)  # type: ignore[arg-type]
    assert told(await limiter.enter("tokens-c", "5"))["x-ratelimit-remaining-tokens"] == "0"
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


async def test_gateways_count_together_and_a_dead_one_takes_nothing_with_it(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = KeyLimits(requests_per_minute=3, concurrent=2)
    first, second = (Limiter(limits, SharedCounters(redis_url, timeout_s=5)) for _ in range(2))
    await first.enter("both", "1")
    await second.enter("both", "2")
    assert "key-concurrent" in (await refused(first, "both", "3")).message
    assert "key-requests-per-minute" in (await refused(second, "both", "4")).message
    monkeypatch.setattr("gateway.limits.shared.LEASE_S", 1.0)
    for limiter in (first, second):
        await limiter._counters.renew()
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
async def test_redis_away_is_no_defect_and_no_hang(refuse: bool) -> None:
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
