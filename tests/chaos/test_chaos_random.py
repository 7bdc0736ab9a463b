"""Random kills under load: an answer is exact, or an honest refusal before it began; then all is idle."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

import pytest

from tests.chaos.support import Asked, Say, serves_exactly
from tests.support.e2e_stack import ProcessStack
from tests.support.service_process import ServiceProcess

SECONDS = 8.0
CLIENTS = 6
# Long enough that some requests are under way at any moment.
TOKENS = 30


async def ask(stack: ProcessStack) -> str:
    """One request; what became of it. Raises AssertionError for an answer that is wrong."""
    one = Asked(stack, TOKENS)
    stream = await one.stream.finish(30)
    assert one.expected.startswith(stream.text)
    if stream.broken:
        return "connection lost"
    if stream.error is not None:
        # No engine at all, or no tokenizer: what was accepted is never cut short.
        assert stream.status in (429, 503), (stream.status, stream.error)
        assert stream.error["code"] in ("engine_unavailable", "tokenizer_unavailable", "rate_limit_exceeded")
        assert "retry-after" in stream.headers
        return f"refused {stream.status}"
    await one.exact()
    return "exact"


async def customer(stack: ProcessStack, until_s: float, seen: Counter[str]) -> None:
    while time.monotonic() < until_s:
        outcome = await ask(stack)
        seen[outcome] += 1
        if outcome != "exact":
            # What a client does that is told to retry.
            await asyncio.sleep(0.1)


async def killer(stack: ProcessStack, until_s: float, draw: random.Random, recoveries: list[float]) -> None:
    """Kill one service or two, start them again, wait until all serve; each dies once in a round."""
    left: list[ServiceProcess] = []
    while time.monotonic() < until_s:
        left = left or draw.sample(stack.services, len(stack.services))
        victims = [left.pop() for _ in range(min(len(left), draw.choice((1, 1, 2))))]
        for victim in victims:
            await asyncio.to_thread(victim.kill)
        await asyncio.sleep(draw.uniform(0.1, 0.5))
        started = time.monotonic()
        stack.start()
        await stack.ready()
        recoveries.append(time.monotonic() - started)
        await asyncio.sleep(draw.uniform(0, 0.5))


@pytest.mark.parametrize("seed", [1])
async def test_random_kills(stack: ProcessStack, seed: int, say: Say) -> None:
    await storm(stack, SECONDS, seed, say)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [2, 3])
async def test_random_kills_for_minutes(stack: ProcessStack, seed: int, say: Say) -> None:
    await storm(stack, 180, seed, say)


async def storm(stack: ProcessStack, seconds: float, seed: int, say: Say) -> None:
    seen: Counter[str] = Counter()
    recoveries: list[float] = []
    until_s = time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        group.create_task(killer(stack, until_s, random.Random(seed), recoveries))
        for _ in range(CLIENTS):
            group.create_task(customer(stack, until_s, seen))
    await stack.idle()
    await serves_exactly(stack)
    assert seen["exact"] > 0
    say(
        f"random kills for {seconds:g} s: {len(recoveries)} times, all served again within "
        f"{max(recoveries):.1f} s; answers: {dict(seen)}"
    )
