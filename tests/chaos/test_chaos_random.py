"""Random kills under load: an answer is exact, or it is an honest error; then everything is idle."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

import pytest

from tests.chaos.support import Asked, Say, serves_exactly
from tests.support.e2e_stack import ProcessStack
from tests.support.service_process import ServiceProcess

SECONDS = 7.0
CLIENTS = 6
# Long enough that some requests are under way at any moment.
TOKENS = 60


async def ask(stack: ProcessStack) -> str:
    """One request; what became of it. Raises AssertionError for an answer that is wrong."""
    one = Asked(stack, TOKENS)
    stream = await one.stream.finish(30)
    assert one.expected.startswith(stream.text)
    if stream.broken:
        return "connection lost"
    if stream.error is not None:
        assert stream.status in (200, 429, 503), (stream.status, stream.error)
        assert stream.error["code"] in ("engine_unavailable", "tokenizer_unavailable", "rate_limit_exceeded")
        assert stream.done == (stream.status == 200)
        assert stream.status == 200 or "retry-after" in stream.headers
        return "cut short" if stream.status == 200 else f"refused {stream.status}"
    await one.exact()
    return "exact"


async def customer(stack: ProcessStack, until_s: float, seen: Counter[str]) -> None:
    while time.monotonic() < until_s:
        outcome = await ask(stack)
        seen[outcome] += 1
        if outcome not in ("exact", "cut short"):
            # What a client does that is told to retry.
            await asyncio.sleep(0.1)


async def killer(stack: ProcessStack, until_s: float, draw: random.Random) -> Counter[str]:
    victims: Counter[str] = Counter()
    round_: list[ServiceProcess] = []
    while time.monotonic() < until_s:
        if not round_:
            # Each dies once in a round, in any order; engines twice.
            round_ = draw.sample([*stack.engines, *stack.services], len(stack.engines) + len(stack.services))
        victim = round_.pop()
        victims[victim.name] += 1
        await asyncio.to_thread(victim.kill)
        await asyncio.sleep(draw.uniform(0.2, 0.6))
        stack.start()
        await asyncio.sleep(draw.uniform(0.2, 0.6))
    return victims


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
    until_s = time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        killing = group.create_task(killer(stack, until_s, random.Random(seed)))
        for _ in range(CLIENTS):
            group.create_task(customer(stack, until_s, seen))
    stack.start()
    await stack.ready()
    await stack.idle()
    await serves_exactly(stack)
    assert seen["exact"] > 0
    say(f"random kills for {seconds:g} s: {dict(killing.result())} -> {dict(seen)}")
