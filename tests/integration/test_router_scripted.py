"""The router over real engine servicers: exact answers, and counts back at zero after every fault."""

from __future__ import annotations

import asyncio
import random
import signal

import grpc
import pytest

from catenary.rpc import error_of
from catenary.v1 import common_pb2
from services.engine.scripted import Script, ScriptedCapacity
from tests.support.specs import expected_tokens, sequence_spec
from tests.support.waiting import eventually

LOST = {common_pb2.ERROR_CODE_ENGINE_LOST}
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


async def test_a_core_that_dies_ends_its_sequences_and_the_engine_serves_again(start_fleet):
    fleet = await start_fleet(engines=1)
    fleet.engines[0].faults.crash_after_tokens = 40
    answers = await asyncio.gather(*[outcome(fleet, [n], max_tokens=64) for n in range(8)])
    for number, answer in enumerate(answers):
        if isinstance(answer, common_pb2.Error):
            assert answer.retryable
        elif answer[1].reason == common_pb2.FINISH_REASON_ERROR:
            assert answer[1].error.retryable
        else:
            # The dead core had not taken it; it waited for the next one.
            assert answer[0] == expected_tokens([number], 64)
    fleet.engines[0].faults.crash_after_tokens = None
    await fleet.serving(1)
    await fleet.idle()
    assert (await outcome(fleet, [7]))[0] == expected_tokens([7], 8)


async def test_a_dropped_stream_is_attached_anew(start_fleet):
    fleet = await start_fleet(engines=1)
    engine = fleet.engines[0]
    engine.faults.step_delay_s = 0.05
    call = fleet.generate(sequence_spec([1], max_tokens=100))
    assert (await call.read()).token_ids
    epoch = next(iter(fleet.router.fleet)).epoch
    engine.drop_streams()
    last = await call.read()
    while not last.HasField("end"):
        last = await call.read()
    assert last.end.error.code == common_pb2.ERROR_CODE_ENGINE_LOST
    await eventually(
        lambda: any(known.epoch > epoch and known.serving for known in fleet.router.fleet), "a new epoch"
    )
    engine.faults.step_delay_s = 0.0
    await fleet.idle()
    assert (await outcome(fleet, [7]))[0] == expected_tokens([7], 8)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_killed_or_stopped_engine_is_lost_and_the_other_goes_on(start_fleet, number):
    fleet = await start_fleet(engines=1)
    process = fleet.add_process(script=Script(step_delay_ms=10))
    await fleet.serving(2)
    fleet.engines[0].faults.step_delay_s = 0.01
    tasks = [asyncio.create_task(outcome(fleet, [n], max_tokens=1000)) for n in range(8)]
    await eventually(
        lambda: min(engine.placed_sequences for engine in fleet.router.fleet) == 4, "four on each"
    )
    process.signal(number)
    await fleet.serving(1)
    fleet.engines[0].faults.step_delay_s = 0.0
    exact = 0
    for prompt, answer in enumerate(await asyncio.gather(*tasks)):
        if isinstance(answer, common_pb2.Error):
            assert answer.code in LOST
            continue
        tokens, end = answer
        assert tokens == expected_tokens([prompt], len(tokens))
        if end.HasField("error"):
            assert end.error.code in LOST
            assert end.error.retryable
        else:
            exact += len(tokens) == 1000
    assert exact >= 4
    await fleet.idle()
    if number == signal.SIGSTOP:
        process.signal(signal.SIGCONT)
        await fleet.serving(2)
