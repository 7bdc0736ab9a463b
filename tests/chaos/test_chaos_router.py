"""The router dies and nobody notices; the gateway dies and its streams break. All come back by themselves."""

from __future__ import annotations

import asyncio

from tests.chaos.support import Asked, serves_exactly
from tests.support.e2e_stack import ProcessStack, busy, until

LONG = 4000
SHORT = 150


async def test_a_killed_router(stack: ProcessStack) -> None:
    asked = [Asked(stack, SHORT) for _ in range(4)]
    await asyncio.gather(*(one.stream.begun() for one in asked))
    first = await stack.fleet()
    assert first is not None

    stack.router.kill()

    async def unready() -> bool:
        return await stack.health("/ready") == 503

    await until(unready, "/ready 503 without a router", timeout_s=2)
    assert await stack.health("/health") == 503
    assert await stack.health("/live") == 200
    late = Asked(stack, SHORT)
    stack.router.start()
    for one in (*asked, late):
        await one.exact()
    await stack.ready()
    again = await stack.fleet()
    assert again is not None
    assert again.router_instance_id != first.router_instance_id
    # The engines themselves never died, and dropped what the dead router had given them.
    assert {e.instance_id for e in again.engines} == {e.instance_id for e in first.engines}
    await stack.idle()
    await serves_exactly(stack)


async def test_a_killed_gateway(stack: ProcessStack) -> None:
    asked = [Asked(stack, LONG) for _ in range(6)]
    await asyncio.gather(*(one.stream.begun() for one in asked))
    fleet = await stack.fleet()
    assert fleet is not None
    assert fleet.live_sequences == 6
    assert all(map(busy, fleet.engines))

    stack.gateway.kill()
    for one in asked:
        assert (await one.stream.finish()).broken
        assert one.expected.startswith(one.stream.text)
    await stack.idle()
    fleet = await stack.fleet()
    assert fleet is not None
    assert (fleet.sessions, fleet.live_sequences) == (0, 0)

    stack.gateway.start()
    await stack.ready()
    await serves_exactly(stack)
