"""Session: many sequences of a gateway over one stream, balanced over engines that come and go."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import grpc
import pytest

from catenary.rpc import error_of, open_channel
from catenary.v1 import common_pb2, engine_pb2, router_pb2, router_pb2_grpc
from catenary_testing.engine.tokens import continuation
from tests.support.router_fakes import (
    CLIENT_SECRET,
    VOCAB,
    FakeEngine,
    FakeGateway,
    expected,
    running_router,
    spec,
    until,
)

BUSY = common_pb2.Error(code=common_pb2.ERROR_CODE_OVERLOADED, message="full", retryable=True)


async def test_two_hundred_sequences_over_two_engines_are_byte_exact_and_balanced(monkeypatch):
    async with (
        running_router(monkeypatch) as (router, address),
        FakeEngine(address, name="a") as first,
        FakeEngine(address, name="b") as second,
        FakeGateway(address) as gateway,
    ):
        await until(lambda: gateway.serving() == 2)
        prompts = {handle: [handle % VOCAB, 5, handle * 7 % VOCAB] for handle in range(200)}
        for handle, prompt in prompts.items():
            await gateway.submit(handle, spec(prompt, seed=handle, max_tokens=24))
        await gateway.ended(*prompts)
        for handle, prompt in prompts.items():
            assert gateway.tokens[handle] == expected(prompt, seed=handle, max_tokens=24)
            assert gateway.ends[handle].reason == common_pb2.FINISH_REASON_LENGTH
            assert gateway.ends[handle].usage.completion_tokens == 24
        assert len(first.submitted) + len(second.submitted) == 200
        assert min(len(first.submitted), len(second.submitted)) >= 60
        # Never one message per token: rows of a tick share a message.
        assert gateway.steps < gateway.rows / 4
        assert router.admission.live_sequences == router.admission.live_tokens == 0
        assert all(engine.placed_sequences == engine.placed_tokens == 0 for engine in router.fleet)


async def test_a_burst_is_spread_before_any_report(monkeypatch):
    async with (
        running_router(monkeypatch) as (_, address),
        FakeEngine(address, name="a", auto=False, reports=False) as first,
        FakeEngine(address, name="b", auto=False, reports=False) as second,
        FakeGateway(address) as gateway,
    ):
        for handle in range(40):
            await gateway.submit(handle, spec([1, 2, 3]))
        await until(lambda: len(first.submitted) + len(second.submitted) == 40)
        assert len(first.submitted) == len(second.submitted) == 20


async def test_a_lost_engine_ends_its_sequences_and_only_those(monkeypatch):
    async with (
        running_router(monkeypatch) as (router, address),
        FakeEngine(address, name="a", auto=False) as lost,
        FakeEngine(address, name="b", auto=False) as stays,
        FakeGateway(address) as gateway,
    ):
        for handle in range(10):
            await gateway.submit(handle, spec([handle, 1], max_tokens=8))
        await until(lambda: len(lost.live) == len(stays.live) == 5)
        await lost.step(3)
        await until(lambda: sum(len(tokens) for tokens in gateway.tokens.values()) == 15)
        await lost.kill()
        await until(lambda: len(gateway.ends) == 5)
        for handle, end in gateway.ends.items():
            assert end.reason == common_pb2.FINISH_REASON_ERROR
            assert end.error.code == common_pb2.ERROR_CODE_ENGINE_LOST
            assert end.error.retryable
            assert end.usage.completion_tokens == 3
            assert gateway.tokens[handle] == expected([handle, 1], max_tokens=8)[:3]
        await stays.step(8)
        await gateway.ended(*range(10))
        assert router.admission.live_sequences == 0
        await until(lambda: gateway.serving() == 1)
        await gateway.submit(100, spec([9]))
        await until(lambda: len(stays.submitted) == 6)


async def test_the_lease_of_a_silent_engine_ends(monkeypatch):
    async with (
        running_router(monkeypatch, lease_ms=300) as (router, address),
        FakeEngine(address, auto=False, reports=False) as engine,
        FakeGateway(address) as gateway,
    ):
        await gateway.submit(1, spec([1]))
        await gateway.ended(1)
        assert gateway.ends[1].error.code == common_pb2.ERROR_CODE_ENGINE_LOST
        assert len(router.fleet) == 0
        assert await engine.call.code() == grpc.StatusCode.UNAVAILABLE
        assert "lease" in await engine.call.details()


async def test_aborts_at_each_stage(monkeypatch):
    async with (
        running_router(monkeypatch) as (router, address),
        FakeEngine(address, auto=False) as engine,
        FakeGateway(address) as gateway,
    ):
        await gateway.submit(1, spec([1]))
        await gateway.abort(1)
        await gateway.ended(1)
        await gateway.submit(2, spec([2]))
        await until(lambda: engine.live)
        await engine.step(2)
        await until(lambda: gateway.tokens.get(2))
        await gateway.abort(2)
        await gateway.ended(2)
        await gateway.submit(3, spec([3], max_tokens=4))
        await until(lambda: engine.live)
        await engine.step(4)
        await gateway.ended(3)
        await gateway.abort(3)
        await gateway.abort(99)
        await until(lambda: len(gateway.abort_results) == 4)
        assert gateway.ends[1].reason == gateway.ends[2].reason == common_pb2.FINISH_REASON_ABORT
        assert gateway.ends[2].usage.completion_tokens == 2
        assert gateway.ends[3].reason == common_pb2.FINISH_REASON_LENGTH
        assert gateway.abort_results == {
            1: common_pb2.ABORT_OUTCOME_ABORTED,
            2: common_pb2.ABORT_OUTCOME_ABORTED,
            3: common_pb2.ABORT_OUTCOME_ALREADY_FINISHED,
            99: common_pb2.ABORT_OUTCOME_UNKNOWN,
        }
        assert router.admission.live_sequences == 0


async def test_an_abort_that_no_engine_confirms_is_over_in_time(monkeypatch):
    async with (
        running_router(monkeypatch, abort_timeout_s=0.3) as (router, address),
        FakeEngine(address, auto=False) as engine,
        FakeGateway(address) as gateway,
    ):
        engine.answer_aborts = False
        await gateway.submit(1, spec([1]))
        await until(lambda: engine.live)
        await gateway.abort(1)
        await gateway.ended(1)
        assert gateway.ends[1].reason == common_pb2.FINISH_REASON_ABORT
        assert router.admission.live_sequences == 0


async def test_the_end_of_a_session_aborts_all_its_sequences(monkeypatch):
    async with running_router(monkeypatch) as (router, address), FakeEngine(address, auto=False) as engine:
        async with FakeGateway(address) as gateway, FakeGateway(address) as neighbour:
            await neighbour.submit(1, spec([5], max_tokens=2))
            for handle in range(20):
                await gateway.submit(handle, spec([handle]))
            await until(lambda: len(engine.live) == 21)
            await gateway.kill()
            await until(lambda: len(engine.live) == 1)
            await engine.step(2)
            await neighbour.ended(1)
            assert neighbour.tokens[1] == expected([5], max_tokens=2)
        await until(lambda: router.admission.live_sequences == 0)
        assert len(engine.aborted) == 20


async def test_refusals_and_the_one_retry_elsewhere(monkeypatch):
    async with (
        running_router(monkeypatch) as (router, address),
        FakeEngine(address, name="a") as first,
        FakeEngine(address, name="b") as second,
        FakeGateway(address) as gateway,
    ):
        first.refuse_with = BUSY
        for handle in range(10):
            await gateway.submit(handle, spec([handle]))
        await gateway.ended(*range(10))
        assert not gateway.refusals
        assert len(first.submitted) >= 1
        assert len(second.submitted) == 10
        second.refuse_with = common_pb2.Error(
            code=common_pb2.ERROR_CODE_OVERLOADED, message="also full", retryable=True, retry_after_ms=70
        )
        # Full for now: it waits until one of them is not.
        before = len(first.submitted) + len(second.submitted)
        await gateway.submit(50, spec([1]))
        await until(lambda: len(first.submitted) + len(second.submitted) >= before + 4)
        second.refuse_with = None
        await gateway.ended(50)
        assert gateway.tokens[50] == expected([1])
        first.refuse_with = second.refuse_with = common_pb2.Error(
            code=common_pb2.ERROR_CODE_INVALID_ARGUMENT, message="bad id", param="prompt"
        )
        before = len(first.submitted) + len(second.submitted)
        await gateway.submit(51, spec([1]))
        await gateway.ended(51)
        assert gateway.refusals[51].param == "prompt"
        assert len(first.submitted) + len(second.submitted) == before + 1
        assert router.admission.live_sequences == 0


async def test_no_serving_engine_is_unavailable_and_the_model_stays_listed(monkeypatch):
    async with (
        running_router(monkeypatch, unserved_wait_s=0) as (_, address),
        FakeGateway(address) as gateway,
    ):
        async with FakeEngine(address) as engine:
            await until(lambda: gateway.serving() == 1)
            engine.state = engine_pb2.ENGINE_STATE_STALLED
            await until(lambda: gateway.serving() == 0)
            await gateway.submit(1, spec([1]))
            await gateway.ended(1)
            assert gateway.refusals[1].code == common_pb2.ERROR_CODE_UNAVAILABLE
            assert gateway.refusals[1].retryable
        await until(lambda: gateway.updates[-1][1].models[0].serving_engines == 0)
        await gateway.submit(2, spec([1]))
        await gateway.ended(2)
        assert gateway.refusals[2].code == common_pb2.ERROR_CODE_UNAVAILABLE


async def test_models_updates_follow_the_load_about_once_a_second(monkeypatch):
    async with (
        running_router(monkeypatch, report_interval_ms=20) as (_, address),
        FakeGateway(address) as gateway,
        FakeEngine(address, auto=False) as engine,
    ):
        await until(lambda: gateway.serving() == 1)
        await gateway.submit(1, spec([1]))
        await until(lambda: engine.live)
        await until(lambda: gateway.updates[-1][1].models[0].load.running == 1)
        count, reports = len(gateway.updates), engine.reports_sent
        await until(lambda: engine.reports_sent >= reports + 15)
        # 15 reports take 0.3 s: of the next update each second at most one falls into that.
        assert len(gateway.updates) <= count + 1


async def test_a_quiet_router_is_heard_in_each_heartbeat(monkeypatch):
    async with running_router(monkeypatch, heartbeat_s=1) as (_, address), FakeGateway(address) as gateway:
        assert gateway.welcome.heartbeat_ms == 1000
        await until(lambda: len(gateway.updates) >= 4)
        times = [when for when, _ in gateway.updates]
        assert max(later - sooner for sooner, later in pairwise(times)) <= 1
        assert all(not update.models for _, update in gateway.updates)


async def test_a_session_must_say_hello_with_a_known_schema(monkeypatch):
    async with running_router(monkeypatch, hello_timeout_s=0.2) as (router, address):
        with pytest.raises(grpc.aio.AioRpcError, match=r"schema revision 4 .* speaks 99"):
            await FakeGateway(address, schema_revision=99, minimum_peer_revision=99).__aenter__()
        channel = open_channel(address, secret=CLIENT_SECRET)
        stub = router_pb2_grpc.RouterServiceStub(channel)
        silent = stub.Session()
        assert await silent.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        rude = stub.Session()
        await rude.write(router_pb2.SessionRequest(abort=engine_pb2.AbortSequence(handle=1)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rude.read()
        assert error_of(caught.value).code == common_pb2.ERROR_CODE_INVALID_ARGUMENT
        await channel.close()
        assert router.admission.live_sequences == 0


def test_the_fake_continues_like_the_scripted_engine():
    assert expected([1, 2], max_tokens=3) == continuation([1, 2], 3, seed=7, vocab_size=VOCAB)


async def test_a_gateway_that_does_not_read_is_ended_and_what_waits_for_it_is_bounded(monkeypatch):
    async with (
        running_router(monkeypatch, slow_reader_s=0.5) as (router, address),
        FakeEngine(address, auto=False) as engine,
        FakeGateway(address, reading=False) as gateway,
        FakeGateway(address) as neighbour,
    ):
        next(iter(router.fleet)).model.max_model_len = 10_000_000
        await neighbour.submit(1, spec([5], max_tokens=4))
        await until(lambda: engine.live)
        quick = next(iter(engine.live))
        for handle in range(4):
            await gateway.submit(handle, spec([handle], max_tokens=None))
        await until(lambda: len(engine.live) == 5)
        flooded = [handle for handle in engine.live if handle != quick]
        while len(engine.aborted) < 4:
            output = common_pb2.StepOutput(
                handles=flooded, token_counts=[50_000] * 4, token_ids=[999] * 200_000
            )
            await engine.send(step=output)
            await asyncio.sleep(0.05)
        assert engine.live.keys() == {quick}
        await engine.step(4)
        await neighbour.ended(1)
        assert neighbour.tokens[1] == expected([5], max_tokens=4)
        await until(lambda: router.admission.live_sequences == 0)
        gateway.read()
        assert await gateway.call.code() == grpc.StatusCode.ABORTED
