"""The router over real engine servicers: exact answers, and counts back at zero after every fault."""

from __future__ import annotations

import asyncio
import random
import signal

import grpc
import pytest

from catenary.rpc import error_of
from catenary.v1 import common_pb2
from catenary_testing.engine import Script, ScriptedCapacity
from tests.support.specs import expected_tokens, sequence_spec
from tests.support.waiting import eventually

SMALL = ScriptedCapacity(max_running=2, max_waiting=1)


async def outcome(fleet, prompt, **options):
    """Tokens and end, or the error of a refusal."""
    try:
        return await fleet.answer(sequence_spec(prompt, **options))
    except grpc.aio.AioRpcError as refusal:
        return error_of(refusal)


async def test_two_hundred_sequences_over_two_engines_are_byte_exact(start_fleet):
    script = Script(capacity=ScriptedCapacity(max_running=128, max_waiting=128))
    fleet = await start_fleet(engines=2, script=script)
    prompts = [[number, number * 3 % 100, 5] for number in range(200)]
    answers = await asyncio.gather(*[outcome(fleet, prompt, max_tokens=20) for prompt in prompts])
    for prompt, (tokens, end) in zip(prompts, answers, strict=True):
        assert tokens == expected_tokens(prompt, 20)
        assert end.reason == common_pb2.FINISH_REASON_LENGTH
        assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (3, 20)
    await fleet.idle()


async def test_a_full_engine_hands_over_and_a_full_fleet_refuses(start_fleet):
    options = {"lane_sequences": (0, 0, 0, 0)}
    fleet = await start_fleet(engines=2, script=Script(capacity=SMALL), router=options)
    for engine in fleet.engines:
        engine.faults.stalled = True
    running = [asyncio.create_task(outcome(fleet, [n])) for n in range(6)]
    await eventually(lambda: fleet.router.admission.live_sequences == 6, "six live sequences")
    refused = await outcome(fleet, [50])
    assert refused.code == common_pb2.ERROR_CODE_OVERLOADED
    assert refused.retryable
    assert refused.retry_after_ms
    for engine in fleet.engines:
        engine.faults.stalled = False
        engine.faults.changed.set()
    for number, task in enumerate(running):
        assert (await task)[0] == expected_tokens([number], 8)
    await fleet.idle()


async def test_cancels_at_every_moment_leave_nothing_behind(start_fleet):
    fleet = await start_fleet(engines=2)
    rng = random.Random(5)

    async def client(number: int) -> None:
        call = fleet.generate(sequence_spec([number], max_tokens=200))
        for _ in range(rng.randrange(6)):
            await call.read()
        call.cancel()

    await asyncio.gather(*[client(number) for number in range(60)])
    await fleet.idle()
    assert (await outcome(fleet, [7]))[0] == expected_tokens([7], 8)


async def test_sequences_outlive_a_core_that_dies(start_fleet):
    fleet = await start_fleet(engines=1)
    (engine,) = fleet.engines
    engine.faults.stall()
    tasks = [asyncio.create_task(outcome(fleet, [n], max_tokens=64)) for n in range(8)]
    await eventually(lambda: engine.app.frontend.live_sequences == 8, "eight sequences")
    engine.faults.resume()
    engine.faults.crash_after_tokens = 40
    for number, (tokens, end) in enumerate(await asyncio.gather(*tasks)):
        assert tokens == expected_tokens([number], 64)
        assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (1, 64)
    assert (await fleet.view()).resumed_sequences == 8
    await fleet.serving(1)
    await fleet.idle()


async def test_a_dropped_stream_is_attached_anew_and_gone_on_with(start_fleet):
    fleet = await start_fleet(engines=1)
    engine = fleet.engines[0]
    engine.faults.step_delay_s = 0.05
    call = fleet.generate(sequence_spec([1], max_tokens=100, top_logprobs=2))
    parts = [await call.read()]
    epoch = next(iter(fleet.router.fleet)).epoch
    engine.drop_streams()
    await eventually(
        lambda: any(known.epoch > epoch and known.serving for known in fleet.router.fleet), "a new epoch"
    )
    engine.faults.step_delay_s = 0.0
    while not parts[-1].HasField("end"):
        parts.append(await call.read())
    assert [token for part in parts for token in part.token_ids] == expected_tokens([1], 100)
    assert sum(len(part.logprobs.sampled) for part in parts) == 100
    assert parts[-1].end.reason == common_pb2.FINISH_REASON_LENGTH
    await fleet.idle()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_sequences_of_a_killed_or_stopped_engine_go_on_on_the_other(start_fleet, number):
    fleet = await start_fleet(engines=1)
    process = fleet.add_process(script=Script(step_delay_ms=10))
    await fleet.serving(2)
    fleet.engines[0].faults.step_delay_s = 0.01
    tasks = [asyncio.create_task(outcome(fleet, [n], max_tokens=1000)) for n in range(8)]

    def placed() -> list[int]:
        return [engine.placed_sequences for engine in fleet.router.fleet]

    # How many each has depends on the loads that were told meanwhile, and so on how busy the machine is.
    await eventually(lambda: sum(placed()) == 8 and min(placed()) > 0, "some on each")
    process.signal(number)
    await fleet.serving(1)
    fleet.engines[0].faults.step_delay_s = 0.0
    for prompt, (tokens, end) in enumerate(await asyncio.gather(*tasks)):
        assert tokens == expected_tokens([prompt], 1000)
        assert end.reason == common_pb2.FINISH_REASON_LENGTH
    await fleet.idle()
    if number == signal.SIGSTOP:
        process.signal(signal.SIGCONT)
        await fleet.serving(2)
