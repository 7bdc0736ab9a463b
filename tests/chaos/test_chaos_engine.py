"""Engines that die and engines that stop: their streams end in order, all others do not notice."""

from __future__ import annotations

import asyncio
import signal
import time

import openai
import pytest
from openai import AsyncOpenAI

from catenary.v1 import router_pb2
from tests.chaos.support import Asked, Say, body, fast_prompt, serves_exactly, slow_prompt
from tests.support.e2e_stack import LEASE_MS, ProcessStack, until
from tests.support.http import call
from tests.support.token_stream import COMPLETIONS

LONG = 4000
SHORT = 150
# The lease, a report's interval and a loaded machine.
HEALTH_S = LEASE_MS / 1000 + 3


async def engine(stack: ProcessStack, name: str) -> router_pb2.FleetEngine | None:
    fleet = await stack.fleet()
    return next((e for e in fleet.engines if e.engine_name == name), None) if fleet else None


async def placed(stack: ProcessStack, name: str) -> int:
    found = await engine(stack, name)
    return found.placed_sequences if found else 0


async def begin(stack: ProcessStack, count: int, tokens: int) -> list[Asked]:
    asked = [Asked(stack, tokens) for _ in range(count)]
    await asyncio.gather(*(one.stream.begun() for one in asked))
    return asked


async def test_a_killed_engine_ends_its_own_streams_only(stack: ProcessStack) -> None:
    victim = stack.engines[0]
    asked = await begin(stack, 6, SHORT)
    on_victim = await placed(stack, victim.name)
    assert on_victim == 3

    victim.kill()
    killed = time.monotonic()
    await asyncio.gather(*(one.stream.finish() for one in asked))
    lost = [one for one in asked if one.stream.error is not None]
    assert len(lost) == on_victim
    for one in lost:
        await one.cut_short()
        assert one.stream.arrivals[-1] - killed < 1
    for one in asked:
        if one not in lost:
            await one.exact()

    # The other engine serves alone, then beside the one that came back.
    assert await stack.health() == 200
    await serves_exactly(stack)
    victim.start()
    await stack.ready()
    both = await begin(stack, 2, 60)
    assert await placed(stack, victim.name) == 1
    for one in both:
        await one.exact()


async def read_with_openai(stack: ProcessStack) -> None:
    async with AsyncOpenAI(base_url=f"{stack.address}/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(**body(slow_prompt(), LONG), stream=True)
        async for _ in stream:
            pass


async def test_a_request_that_waits_on_a_killed_engine_is_told_to_retry(stack: ProcessStack) -> None:
    stack.engines[1].stop()
    reader = asyncio.create_task(read_with_openai(stack))
    answer = asyncio.create_task(
        call(stack.address, "POST", COMPLETIONS, body(slow_prompt(), LONG), timeout_s=30)
    )

    async def accepted() -> bool:
        return await placed(stack, stack.engines[0].name) == 2

    await until(accepted, "two placed requests")
    stack.engines[0].kill()
    refused = await answer
    assert refused.status == 503
    assert refused.json()["error"]["code"] == "engine_unavailable"
    assert "retry-after" in refused.headers
    with pytest.raises(openai.APIError, match="lost") as caught:
        await reader
    assert caught.value.code == "engine_unavailable"

    async def unwell() -> bool:
        return await stack.health() == 503

    await until(unwell, "/health 503 without any engine", timeout_s=2)
    # A death is seen at once, so that nobody waits for a lease.
    late = await call(stack.address, "POST", COMPLETIONS, body(fast_prompt(), 4))
    assert (late.status, "retry-after" in late.headers) == (503, True)


async def test_the_only_engine_stops_and_wakes_up(stack: ProcessStack, say: Say) -> None:
    sleeper = stack.engines[0]
    stack.engines[1].stop()
    asked = await begin(stack, 3, LONG)
    before = await engine(stack, sleeper.name)
    assert before is not None
    assert before.placed_sequences == 3

    sleeper.send(signal.SIGSTOP)
    stopped = time.monotonic()

    async def unwell() -> bool:
        return await stack.health() == 503

    await until(unwell, f"/health 503 within {HEALTH_S:g} s", timeout_s=HEALTH_S)
    noticed = time.monotonic() - stopped
    for one in asked:
        await one.cut_short()
    refused = await call(stack.address, "POST", COMPLETIONS, body(fast_prompt(), 4))
    assert refused.status == 503
    assert "retry-after" in refused.headers
    fleet = await stack.fleet()
    assert fleet is not None
    assert (len(fleet.engines), fleet.live_sequences) == (0, 0)

    sleeper.send(signal.SIGCONT)

    async def back() -> bool:
        return await stack.health() == 200

    await until(back, "/health 200 after SIGCONT", timeout_s=15)
    # What it was computing is given up on its side too, before and after its new lease.
    await stack.idle()
    after = await engine(stack, sleeper.name)
    assert after is not None
    assert after.instance_id == before.instance_id
    assert after.lease_epoch > before.lease_epoch
    await serves_exactly(stack)
    assert all(one.stream.after_done == b"" for one in asked)
    say(f"SIGSTOP of the only engine: /health 503 after {noticed:.1f} s (lease {LEASE_MS} ms)")


async def test_a_stopped_engine_beside_a_good_one(stack: ProcessStack) -> None:
    sleeper = stack.engines[1]
    asked = await begin(stack, 4, 220)
    assert await placed(stack, sleeper.name) == 2
    sleeper.send(signal.SIGSTOP)
    await asyncio.gather(*(one.stream.finish() for one in asked))
    cut = [one for one in asked if one.stream.error is not None]
    assert len(cut) == 2
    for one in asked:
        await (one.cut_short() if one in cut else one.exact())
    assert await stack.health() == 200
    await serves_exactly(stack)
