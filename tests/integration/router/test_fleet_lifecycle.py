"""Engines that join, stall, crash in a loop, come back with another model, or are filled by two routers."""

from __future__ import annotations

import asyncio

from catenary.v1 import engine_pb2, router_pb2
from catenary_testing.engine import Script, ScriptedCapacity, ScriptedModel
from services.router.fleet import BreakerState
from tests.support.engines import ScriptedEngine
from tests.support.specs import expected_tokens, sequence_spec
from tests.support.waiting import eventually

SLOW = Script(step_delay_ms=5)
NARROW = Script(step_delay_ms=5, capacity=ScriptedCapacity(max_running=4, max_waiting=0))


async def answers_to(fleet, prompts, max_tokens=30):
    return await asyncio.gather(*(fleet.answer(sequence_spec(one, max_tokens=max_tokens)) for one in prompts))


async def test_an_engine_that_joins_under_load_gets_what_waits(start_fleet):
    fleet = await start_fleet(script=NARROW)
    prompts = [[index + 3, 9] for index in range(24)]
    running = asyncio.create_task(answers_to(fleet, prompts, 60))
    await eventually(lambda: fleet.router.admission.live_sequences == 24, "all to be admitted")
    joined = await fleet.add_engine(script=NARROW)
    for prompt, (tokens, _) in zip(prompts, await running, strict=True):
        assert tokens == expected_tokens(prompt, 60)
    assert joined.app.frontend.load().generated_tokens >= 4 * 60
    await fleet.idle()


async def test_two_routers_fill_one_engine_between_them_and_nothing_is_lost(start_fleet):
    first, second = await start_fleet(engines=0), await start_fleet(engines=0)
    addresses = [first.router_address, second.router_address]
    engine = ScriptedEngine(addresses, first.secrets, listen=("127.0.0.1:0",), script=NARROW)
    await engine.start()
    try:
        await first.serving(1)
        await second.serving(1)
        prompts = [[index + 3, 9] for index in range(12)]
        both = await asyncio.gather(*(answers_to(fleet, prompts) for fleet in (first, second)))
        for answers in both:
            for prompt, (tokens, _) in zip(prompts, answers, strict=True):
                assert tokens == expected_tokens(prompt, 30)
        await first.idle()
        await second.idle()
    finally:
        await engine.stop()


async def test_an_engine_comes_back_under_its_name_with_another_model(start_fleet):
    fleet = await start_fleet(engines=0)
    old = fleet.add_process(script=SLOW, flags=("--engine-name", "e", "--served-model-name", "old"))
    await fleet.serving(1)
    running = asyncio.create_task(fleet.answer(sequence_spec([7], model="old", max_tokens=60)))
    await eventually(lambda: fleet.router.admission.live_sequences == 1, "a sequence that runs")

    # The same name with another vocabulary is refused for as long as the old one is there.
    other = Script(step_delay_ms=5, model=ScriptedModel(vocab_size=500))
    await fleet.add_engine(script=other, served_model_name="old", engine_name="twin")
    await fleet.stub.Drain(router_pb2.DrainRequest(engine="e"))
    tokens, _ = await running
    assert tokens == expected_tokens([7], 60)
    assert await old.wait() == 0
    await fleet.serving(1)
    tokens, _ = await fleet.answer(sequence_spec([7], model="old", max_tokens=8))
    assert tokens == expected_tokens([7], 8, script=other)

    await fleet.add_engine(script=SLOW, served_model_name="new", engine_name="e")
    await fleet.serving(2)
    tokens, _ = await fleet.answer(sequence_spec([8], model="new", max_tokens=8))
    assert tokens == expected_tokens([8], 8)


async def test_an_engine_that_stalls_loses_its_work_until_it_makes_steps_again(start_fleet):
    fleet = await start_fleet(script=SLOW, router={"stall_s": 0.5}, stall_limit_s=60.0)
    stalls = fleet.engines[0]
    call = asyncio.create_task(fleet.answer(sequence_spec([11, 12], max_tokens=200)))
    await eventually(lambda: stalls.app.frontend.load().generated_tokens > 3, "tokens")
    stalls.faults.stall()
    helper = await fleet.add_engine(script=SLOW)
    await fleet.serving(1)
    await eventually(lambda: any(one.stalled for one in fleet.router.fleet), "the stall")
    # Its reports still say that it serves.
    assert {one.state for one in fleet.router.fleet} == {engine_pb2.ENGINE_STATE_SERVING}
    seen = {one.engine_name: (one.state, one.load.state) for one in (await fleet.view()).engines}
    serving, stalled = engine_pb2.ENGINE_STATE_SERVING, engine_pb2.ENGINE_STATE_STALLED
    assert seen == {"engine-0": (stalled, serving), "engine-1": (serving, serving)}
    assert (await call)[0] == expected_tokens([11, 12], 200)
    tokens, _ = await fleet.answer(sequence_spec([5], max_tokens=8))
    assert tokens == expected_tokens([5], 8)
    assert helper.app.frontend.load().generated_tokens >= 8
    stalls.faults.resume()
    await fleet.serving(2)
    await fleet.idle()


async def test_a_crash_loop_is_not_given_everything_at_once(start_fleet):
    options = {"breaker_faults": 2, "breaker_open_s": 0.4}
    fleet = await start_fleet(script=SLOW, router=options)
    (engine,) = fleet.engines
    call = asyncio.create_task(fleet.answer(sequence_spec([9], max_tokens=100)))
    for crashes in (1, 2):
        await eventually(lambda: engine.app.frontend.load().running == 1, "a sequence that runs")
        engine.faults.crash()
        await eventually(lambda n=crashes: engine.app.frontend.core_restarts == n, "another core")
        await fleet.serving(1)
    (attached,) = fleet.router.fleet
    assert not attached.available
    view = (await fleet.view()).engines[0]
    assert view.breaker in (router_pb2.BREAKER_STATE_OPEN, router_pb2.BREAKER_STATE_HALF_OPEN)
    # What comes now waits for the probe, and then all goes.
    most = 0
    prompts = [[index + 3, 7] for index in range(8)]
    running = asyncio.create_task(answers_to(fleet, prompts))
    while attached.breaker.state is not BreakerState.CLOSED:
        most = max(most, attached.placed_sequences)
        await asyncio.sleep(0.002)
    assert most <= 1
    for prompt, (tokens, _) in zip(prompts, await running, strict=True):
        assert tokens == expected_tokens(prompt, 30)
    # The one that was there through all of it has lost nothing.
    assert (await call)[0] == expected_tokens([9], 100)
    await fleet.idle()
