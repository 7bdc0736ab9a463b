"""Scripted engines behind a real router: leases both ways, loss, drain, many streams."""

from __future__ import annotations

import asyncio
import signal

import grpc
import pytest

from catenary.rpc import TlsFiles, error_of, open_channel
from catenary.v1 import common_pb2, engine_pb2, router_pb2, router_pb2_grpc
from catenary_testing.engine import Script
from tests.support.certificates import make_authority, make_certificate
from tests.support.specs import expected_tokens, sequence_spec
from tests.support.waiting import eventually

PROMPT = [11, 12, 13]
SLOW = Script(step_delay_ms=5)
# Plain calls that end with their engine: what is left behind is looked at here, failover elsewhere.
ONE_LIFE = {"failover_lives": 1, "failover_wait_s": 0}


async def _last(call):
    """The last message of a call that was begun with read()."""
    last = None
    while (message := await call.read()) is not grpc.aio.EOF:
        last = message
    return last


async def test_many_streams_over_two_engines_all_come_out_right(start_fleet):
    fleet = await start_fleet(engines=2, script=SLOW)
    prompts = [[index + 3, 9, index + 5] for index in range(32)]
    answers = await asyncio.gather(*(fleet.answer(sequence_spec(p, max_tokens=48)) for p in prompts))
    for prompt, (tokens, end) in zip(prompts, answers, strict=True):
        assert tokens == expected_tokens(prompt, 48)
        assert end.usage.completion_tokens == 48
    assert all(engine.app.frontend.load().generated_tokens > 0 for engine in fleet.engines)
    await fleet.idle()


async def test_an_engine_attaches_over_tls_with_no_more_than_the_authority(start_fleet, tmp_path):
    make_authority(tmp_path, "authority")
    server = make_certificate(tmp_path, "server", "authority")
    router = {"listen": ("127.0.0.1:0",), "tls_cert": server.cert, "tls_key": server.key}
    fleet = await start_fleet(router=router, tls_ca=server.ca)
    trusting = TlsFiles(None, None, server.ca)
    async with open_channel(fleet.router_address, secret=fleet.secrets.client, tls=trusting) as channel:
        call = router_pb2_grpc.RouterServiceStub(channel).Generate(
            router_pb2.GenerateRequest(spec=sequence_spec(PROMPT))
        )
        tokens = [token async for response in call for token in response.token_ids]
    assert tokens == expected_tokens(PROMPT, 8)
    await fleet.idle()


async def test_a_cancelled_call_aborts_the_sequence_in_the_engine(start_fleet):
    fleet = await start_fleet(script=SLOW)
    call = fleet.generate(sequence_spec(PROMPT, max_tokens=4000))
    await call.read()
    call.cancel()
    await fleet.idle()


async def test_the_sequences_of_a_killed_engine_process_go_on_elsewhere(start_fleet):
    fleet = await start_fleet(engines=0)
    process = fleet.add_process(script=SLOW)
    await fleet.serving(1)
    call = fleet.generate(sequence_spec(PROMPT, max_tokens=500))
    found = list((await call.read()).token_ids)
    await fleet.add_engine(script=SLOW)
    await fleet.serving(2)
    process.signal(signal.SIGKILL)
    end = None
    while (message := await call.read()) is not grpc.aio.EOF:
        found += message.token_ids
        end = message.end
    assert found == expected_tokens(PROMPT, 500)
    assert (end.reason, end.usage.completion_tokens) == (common_pb2.FINISH_REASON_LENGTH, 500)
    tokens, _ = await fleet.answer(sequence_spec(PROMPT, max_tokens=10))
    assert tokens == expected_tokens(PROMPT, 10)
    process.start()
    await fleet.serving(2)
    await fleet.idle()


async def test_a_frozen_link_costs_both_sides_the_lease(start_fleet):
    fleet = await start_fleet(engines=0, router={"lease_ms": 600, "report_interval_ms": 50, **ONE_LIFE})
    proxy = await fleet.add_proxy()
    engine = await fleet.add_engine(via=proxy, script=SLOW)
    await fleet.serving(1)
    call = fleet.generate(sequence_spec(PROMPT, max_tokens=4000))
    await call.read()
    proxy.freeze()
    end = (await _last(call)).end
    assert end.error.code == common_pb2.ERROR_CODE_ENGINE_LOST
    await eventually(lambda: len(engine.app.frontend.routers) == 0, "the engine to leave")
    await engine.idle()
    proxy.thaw()
    await fleet.serving(1)
    tokens, _ = await fleet.answer(sequence_spec(PROMPT, max_tokens=10))
    assert tokens == expected_tokens(PROMPT, 10)
    await fleet.idle()


async def test_a_cut_link_is_dialled_again(start_fleet):
    fleet = await start_fleet(engines=0, router=ONE_LIFE)
    proxy = await fleet.add_proxy()
    engine = await fleet.add_engine(via=proxy, script=SLOW)
    await fleet.serving(1)
    call = fleet.generate(sequence_spec(PROMPT, max_tokens=4000))
    await call.read()
    proxy.cut()
    end = (await _last(call)).end
    assert end.error.code == common_pb2.ERROR_CODE_ENGINE_LOST
    await engine.idle()
    await fleet.serving(1)
    tokens, _ = await fleet.answer(sequence_spec(PROMPT, max_tokens=10))
    assert tokens == expected_tokens(PROMPT, 10)


async def test_a_draining_engine_gets_nothing_new(start_fleet):
    fleet = await start_fleet(engines=2, script=SLOW)
    calls = [fleet.generate(sequence_spec([9, index], max_tokens=100)) for index in range(3, 5)]
    for call in calls:
        await call.read()
    stopping = asyncio.create_task(fleet.engines[0].stop(drain_s=10))
    await fleet.serving(1)
    steps = fleet.engines[0].app.frontend.load().generated_tokens
    tokens, _ = await fleet.answer(sequence_spec(PROMPT, max_tokens=10))
    assert tokens == expected_tokens(PROMPT, 10)
    for call in calls:
        assert (await _last(call)).end.reason == common_pb2.FINISH_REASON_LENGTH
    await stopping
    assert fleet.engines[0].app.frontend.load().generated_tokens < steps + 110
    await fleet.idle()


@pytest.mark.parametrize("fault", ["stall", "crash"])
async def test_an_engine_that_cannot_serve_is_not_placed_on(start_fleet, fault):
    fleet = await start_fleet(router=ONE_LIFE, script=SLOW, stall_limit_s=0.2, core_restart_backoff_s=60.0)
    call = fleet.generate(sequence_spec(PROMPT, max_tokens=4000))
    await call.read()
    getattr(fleet.engines[0].faults, fault)()
    await fleet.serving(0)
    patient = sequence_spec(PROMPT)
    patient.max_wait_ms = 200
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await fleet.answer(patient)
    error = error_of(caught.value)
    assert error.code == common_pb2.ERROR_CODE_UNAVAILABLE
    assert error.retryable
    state = (await fleet.view()).engines[0].load.state
    wanted = {"stall": engine_pb2.ENGINE_STATE_STALLED, "crash": engine_pb2.ENGINE_STATE_NOT_SERVING}
    assert state == wanted[fault]


async def test_a_bad_sequence_is_refused_through_the_router(start_fleet):
    fleet = await start_fleet()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await fleet.answer(sequence_spec([5] * 5000))
    error = error_of(caught.value)
    assert error.code == common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED
    assert "4096" in error.message
    await fleet.idle()
