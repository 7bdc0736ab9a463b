"""Engines killed one after another under load, then a router: every request completes, byte by byte right."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.load import Load, keep_killing, resumed
from tests.chaos.support import MODEL, Asked, Say, scripted_flags
from tests.support.e2e_stack import ProcessStack, StackPlan, running_stack, until
from tests.support.tiny_tokenizer import write_tiny_model

STREAMS = 32
STEP_MS = 30
KILL_EVERY_S = 2.0
# A kill counts only if it costs so many sequences.
BUSY = 5


@pytest.fixture(scope="module")
def fleet_processes() -> Iterator[ProcessStack]:
    """Three scripted engines, two routers, a tokenizer and a gateway."""

    def plan(directory: Path) -> StackPlan:
        return StackPlan(
            model_dir=write_tiny_model(directory / "model"),
            model=MODEL,
            engines=3,
            routers=2,
            engine_flags=scripted_flags(directory, step_delay_ms=STEP_MS),
        )

    with running_stack(plan) as stack:
        yield stack


async def chaos(stack: ProcessStack, seconds: float, say: Say) -> None:
    """Kill engines for so long and then a router, under load from begin to end."""
    await stack.ready()
    rng = random.Random(20)
    before = await resumed(stack)
    load = Load(STREAMS, lambda: Asked(stack, rng.randrange(20, 80), slow=False))
    kills = await keep_killing(stack, seconds=seconds, every_s=KILL_EVERY_S, at_least=BUSY, of=2, rng=rng)

    victim = stack.routers[1]

    async def busy() -> bool:
        fleet = await stack.fleet(victim.name)
        return fleet is not None and fleet.live_sequences >= BUSY

    await until(busy, "a router with sequences")
    victim.kill()
    await asyncio.sleep(1)
    victim.start()
    await load.stop()
    say(
        f"{kills} engines and a router killed in {seconds:g} s and a little more: {load.completed} of "
        f"{load.asked} requests completed, {load.exact} exact; {await resumed(stack) - before} "
        "sequences resumed"
    )
    load.all_exact()
    await stack.ready()
    await stack.idle()


async def test_engines_and_a_router_die_for_some_seconds(fleet_processes: ProcessStack, say: Say) -> None:
    await chaos(fleet_processes, 3, say)


async def test_a_rolling_restart_of_all_engines_and_routers(fleet_processes: ProcessStack, say: Say) -> None:
    stack = fleet_processes
    await stack.ready()
    rng = random.Random(21)
    before = await resumed(stack)
    load = Load(STREAMS // 2, lambda: Asked(stack, rng.randrange(10, 40), slow=False))
    for engine in stack.engines:
        async with stack.client() as client:
            (instance,) = await client.drain(engine.name, deadline_ms=30_000)
        assert await engine.ended() == 0
        engine.start()
        await stack.ready()
        fleet = await stack.fleet()
        assert fleet is not None
        assert instance not in [one.instance_id for one in fleet.engines]
    of_engines = await resumed(stack) - before
    for router in stack.routers:
        router.send(signal.SIGTERM)
        assert await router.ended() == 0
        router.start()
        await stack.ready()
    await load.stop()
    say(
        f"rolling restart of 3 engines and 2 routers: {load.completed} of {load.asked} requests completed, "
        f"{load.exact} exact"
    )
    load.all_exact()
    # A drain that may take its time moves nothing.
    assert of_engines == 0
    await stack.idle()


@pytest.mark.long
async def test_engines_and_a_router_die_for_a_minute(fleet_processes: ProcessStack, say: Say) -> None:
    await chaos(fleet_processes, 60, say)
