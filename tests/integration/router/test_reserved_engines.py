"""Engines that are kept empty for one sequence while several routers are busy with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from catenary.v1 import common_pb2, engine_pb2
from catenary_testing.engine import Script, ScriptedCapacity
from services.engine.servicer.routers import RouterOutbox
from tests.support.fake_router import FakeRouter
from tests.support.router_fakes import FakeGateway
from tests.support.specs import expected_tokens, sequence_spec
from tests.support.waiting import eventually

PATIENT = {"lease_ms": 60_000}
OVERLOADED = common_pb2.ERROR_CODE_OVERLOADED


@asynccontextmanager
async def crowd(fleet: Any, streams: int) -> AsyncIterator[list[int]]:
    """Streams through a router that begin anew whenever they end; the count of those that ended well."""
    ended = [0]

    async def again_and_again(number: int) -> None:
        while True:
            tokens, _ = await fleet.answer(sequence_spec([number], max_tokens=10 * number))
            assert tokens == expected_tokens([number], 10 * number)
            ended[0] += 1

    tasks = [asyncio.create_task(again_and_again(number)) for number in range(1, streams + 1)]
    try:
        yield ended
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()


@pytest.mark.parametrize("what", ["alone", "most of the KV"])
async def test_an_engine_empties_though_another_router_is_busy(start_fleet, what):
    """Without a word to the engine, the other router's streams would go on there for ever."""
    capacity = ScriptedCapacity(block_size=16, total_blocks=14, prefix_caching=True)
    fleet = await start_fleet(engines=0, router=PATIENT)
    other = await start_fleet(engines=0, router=PATIENT)
    engine = await fleet.add_engine(
        routers=[fleet.router_address, other.router_address],
        script=Script(step_delay_ms=2, capacity=capacity),
    )
    await fleet.serving(1)
    await other.serving(1)
    prompt = [7] * (200 if what != "alone" else 3)
    async with (
        crowd(fleet, 2) as ours,
        crowd(other, 8) as others,
        FakeGateway(fleet.router_address, secret=fleet.secrets.client) as gateway,
    ):
        await eventually(lambda: min(ours[0], others[0]) > 3, "streams through both routers")
        await gateway.submit(1, sequence_spec(prompt), alone=what == "alone")
        await gateway.ended(1)
        assert gateway.tokens[1] == expected_tokens(prompt, 8)
        before = others[0]
        await eventually(lambda: others[0] > before + 3, "the other router's streams")
    await eventually(lambda: not engine.app.frontend.routers.turns, "nobody for whom it is kept")


@pytest.mark.parametrize("what", ["alone", "most of the KV"])
async def test_two_routers_take_turns(start_fleet, what):
    capacity = ScriptedCapacity(block_size=16, total_blocks=14, prefix_caching=True)
    fleet = await start_fleet(engines=0, router=PATIENT)
    other = await start_fleet(engines=0, router=PATIENT)
    both = [fleet.router_address, other.router_address]
    engine = await fleet.add_engine(routers=both, script=Script(step_delay_ms=2, capacity=capacity))
    prompts = {n: [n] * (200 if what != "alone" else 3) for n in (1, 2, 3)}
    await fleet.serving(1)
    await other.serving(1)
    async with (
        crowd(fleet, 2),
        crowd(other, 2),
        FakeGateway(both[0], secret=fleet.secrets.client) as one,
        FakeGateway(both[1], secret=fleet.secrets.client) as two,
    ):
        for handle, prompt in prompts.items():
            for gateway in (one, two):
                await gateway.submit(handle, sequence_spec(prompt), alone=what == "alone")
        for gateway in (one, two):
            await gateway.ended(1, 2, 3)
            assert gateway.tokens == {n: expected_tokens(prompt, 8) for n, prompt in prompts.items()}
    await eventually(lambda: not engine.app.frontend.routers.turns, "nobody for whom it is kept")


async def test_the_owner_of_a_reservation_finds_its_engine_reserved(fake_router, start_fleet, monkeypatch):
    """A third router waits for its turn: whoever gave the engine back too early would be refused."""
    refused = []
    submit = RouterOutbox.refuse
    monkeypatch.setattr(RouterOutbox, "refuse", lambda *args: refused.append(args[1:]) or submit(*args))
    capacity = ScriptedCapacity(block_size=16, total_blocks=14, prefix_caching=True)
    fleet = await start_fleet(engines=0, router=PATIENT)
    await fleet.add_engine(
        routers=[fleet.router_address, fake_router.address],
        script=Script(step_delay_ms=20, capacity=capacity),
    )
    await fleet.serving(1)
    theirs = await fake_router.attached()
    await theirs.submit(1, sequence_spec([1] * 90, max_tokens=100))
    await eventually(lambda: all(each.kv.held for each in fleet.router.fleet), "a stream")
    async with FakeGateway(fleet.router_address, secret=fleet.secrets.client) as gateway:
        await gateway.submit(1, sequence_spec([7] * 200))
        await eventually(lambda: theirs.load.kept, "a turn")
        await theirs.send(keep=engine_pb2.KeepEngine(wanted=True))
        await theirs.abort(1)
        await gateway.ended(1)
        assert gateway.tokens[1] == expected_tokens([7] * 200, 8)
        assert refused == []
        await eventually(lambda: not theirs.load.kept, "the other one's turn")


async def test_a_router_that_never_gives_back_closes_an_engine_to_nobody_for_ever(fake_router, start_fleet):
    fleet = await start_fleet(engines=0, router=PATIENT)
    await fleet.add_engine(routers=[fleet.router_address, fake_router.address], kept_limit_s=0.2)
    await fleet.serving(1)
    theirs = await fake_router.attached()
    await theirs.send(keep=engine_pb2.KeepEngine(wanted=True))
    tokens, _ = await fleet.answer(sequence_spec([8]))
    assert tokens == expected_tokens([8], 8)


async def test_the_engine_has_the_last_word(fake_router, start_engine, secrets, run_dir):
    second = FakeRouter(secrets, f"unix:{run_dir}/second.sock")
    await second.start()
    try:
        engine = await start_engine([fake_router.address, second.address], script=Script(step_delay_ms=2))
        ours, theirs = await fake_router.attached(), await second.attached()
        long = sequence_spec([1], max_tokens=2000)
        await theirs.submit(1, long)
        await eventually(lambda: theirs.tokens.get(1), "a stream")
        alone = common_pb2.Submit(handle=1, spec=sequence_spec([2]), alone=True)
        await ours.send(submit=alone)
        refused = await ours.refusal_of(1)
        assert (refused.code, refused.retryable) == (OVERLOADED, True)
        await ours.send(keep=engine_pb2.KeepEngine(wanted=True))
        await eventually(lambda: theirs.load.kept and not ours.load.kept, "word of it")
        await theirs.submit(2, sequence_spec([3]))
        refused = await theirs.refusal_of(2)
        assert (refused.code, refused.retryable) == (OVERLOADED, True)
        await theirs.abort(1)
        await eventually(lambda: ours.load.running == 0, "an empty engine")
        await ours.send(submit=common_pb2.Submit(handle=2, spec=sequence_spec([2]), alone=True))
        await ours.end_of(2)
        assert ours.tokens[2] == expected_tokens([2], 8)
        # A router that goes keeps nothing.
        await fake_router.stop()
        await eventually(lambda: not theirs.load.kept, "the end of its turn")
        await theirs.submit(3, sequence_spec([3]))
        await theirs.end_of(3)
        await engine.idle()
    finally:
        await second.stop()
