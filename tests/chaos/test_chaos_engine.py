"""Engines that die and engines that stop: nobody notices, but for a pause."""

from __future__ import annotations

import asyncio
import signal
import time

from openai import AsyncOpenAI

from catenary.v1 import router_pb2
from tests.chaos.support import Asked, Say, body, expected_text, serves_exactly, slow_prompt
from tests.support.e2e_stack import LEASE_MS, ProcessStack, until
from tests.support.http import call
from tests.support.token_stream import COMPLETIONS

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


async def test_the_streams_of_a_killed_engine_go_on_elsewhere(stack: ProcessStack) -> None:
    victim = stack.engines[0]
    asked = await begin(stack, 6, SHORT)
    assert await placed(stack, victim.name) == 3

    victim.kill()
    for one in asked:
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


async def read_with_openai(stack: ProcessStack, prompt: list[int]) -> str:
    async with AsyncOpenAI(base_url=f"{stack.address}/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(**body(prompt, SHORT), stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])


async def test_requests_wait_for_the_only_engine_to_come_back(stack: ProcessStack) -> None:
    stack.engines[1].stop()
    streamed, whole = slow_prompt(), slow_prompt()
    reader = asyncio.create_task(read_with_openai(stack, streamed))
    answer = asyncio.create_task(call(stack.address, "POST", COMPLETIONS, body(whole, SHORT), timeout_s=30))

    async def accepted() -> bool:
        return await placed(stack, stack.engines[0].name) == 2

    await until(accepted, "two placed requests")
    stack.engines[0].kill()

    async def unwell() -> bool:
        return await stack.health() == 503

    await until(unwell, "/health 503 without any engine", timeout_s=2)
    late = Asked(stack, 4, slow=False)
    stack.engines[0].start()
    await late.exact()
    assert await reader == expected_text(streamed, SHORT)
    answered = (await answer).json()
    assert answered["choices"][0]["text"] == expected_text(whole, SHORT)
    assert answered["usage"]["completion_tokens"] == SHORT


async def test_the_only_engine_stops_and_wakes_up(stack: ProcessStack, say: Say) -> None:
    sleeper = stack.engines[0]
    stack.engines[1].stop()
    asked = await begin(stack, 3, SHORT)
    before = await engine(stack, sleeper.name)
    assert before is not None
    assert before.placed_sequences == 3

    sleeper.send(signal.SIGSTOP)
    stopped = time.monotonic()

    async def unwell() -> bool:
        return await stack.health() == 503

    await until(unwell, f"/health 503 within {HEALTH_S:g} s", timeout_s=HEALTH_S)
    noticed = time.monotonic() - stopped
    late = Asked(stack, 4, slow=False)
    fleet = await stack.fleet()
    assert fleet is not None
    assert (len(fleet.engines), fleet.live_sequences) == (0, 0)

    sleeper.send(signal.SIGCONT)

    async def back() -> bool:
        return await stack.health() == 200

    await until(back, "/health 200 after SIGCONT", timeout_s=15)
    # It goes on with what it was computing, under its new lease: that of the old one is given up.
    for one in (*asked, late):
        await one.exact()
    await stack.idle()
    after = await engine(stack, sleeper.name)
    assert after is not None
    assert after.instance_id == before.instance_id
    assert after.lease_epoch > before.lease_epoch
    await serves_exactly(stack)
    say(f"SIGSTOP of the only engine: /health 503 after {noticed:.1f} s (lease {LEASE_MS} ms)")


async def test_a_stopped_engine_beside_a_good_one(stack: ProcessStack) -> None:
    sleeper = stack.engines[1]
    asked = await begin(stack, 4, SHORT)
    assert await placed(stack, sleeper.name) == 2
    sleeper.send(signal.SIGSTOP)
    for one in asked:
        await one.exact()
    assert await stack.health() == 200
    await serves_exactly(stack)
