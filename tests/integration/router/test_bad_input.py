"""Peers that break every rule: nothing of anybody else is lost, and nothing is left behind."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import suppress

import grpc
import pytest

from catenary.rpc import open_channel
from catenary.schema import MINIMUM_PEER_REVISION, SCHEMA_REVISION
from catenary.v1 import common_pb2, engine_pb2, router_pb2, router_pb2_grpc
from tests.support.router_fakes import (
    CLIENT_SECRET,
    FakeEngine,
    FakeGateway,
    expected,
    running_router,
    spec,
    until,
)

LONG = 200


@pytest.mark.advisory("CVE-2026-92972")
async def test_request_ids_that_come_twice_cost_nothing_but_the_copy(monkeypatch):
    async with (
        running_router(monkeypatch) as (router, address),
        FakeEngine(address),
        FakeGateway(address) as gateway,
        FakeGateway(address, instance_id="gateway-2") as neighbour,
    ):
        named = spec([3], max_tokens=LONG)
        named.request_id = "same"
        await gateway.submit(1, named)
        for handle in range(2, 30):
            await gateway.submit(handle, named)
        # Another gateway's ids are its own.
        await neighbour.submit(1, named)
        await gateway.ended(*range(1, 30))
        await neighbour.ended(1)
        codes = {error.code for error in gateway.refusals.values()}
        assert codes == {common_pb2.ERROR_CODE_DUPLICATE_REQUEST}
        assert len(gateway.refusals) == 28
        assert gateway.tokens[1] == neighbour.tokens[1] == expected([3], max_tokens=LONG)
        assert router.admission.live_sequences == 0


async def test_an_engine_cannot_speak_for_the_sequences_of_another(monkeypatch):
    async with (
        running_router(monkeypatch) as (router, address),
        FakeEngine(address, name="honest", auto=False) as honest,
        FakeGateway(address) as gateway,
    ):
        await gateway.submit(1, spec([3], max_tokens=6))
        await until(lambda: honest.live)
        (handle,) = honest.live
        async with FakeEngine(address, name="liar", auto=False) as liar:
            await honest.step(2)
            lie = common_pb2.StepOutput(
                handles=[handle], token_counts=[1], token_ids=[9], ends=[{"row": 0, "reason": 1}]
            )
            await liar.send(step=lie)
            await liar.send(refusal=common_pb2.Refusal(handle=handle))
            outcome = common_pb2.ABORT_OUTCOME_UNKNOWN
            await liar.send(abort_result=engine_pb2.AbortResult(handle=handle, outcome=outcome))
            await liar.report()
            await until(lambda: liar.renewed)
            await honest.step(4)
            await gateway.ended(1)
        assert gateway.tokens[1] == expected([3], max_tokens=6)
        assert router.admission.live_sequences == 0


@pytest.mark.advisory("CVE-2026-33186")
async def test_a_message_that_is_too_large_ends_its_sender_and_nobody_else(monkeypatch):
    async with (
        running_router(monkeypatch, max_message_mib=1) as (router, address),
        FakeEngine(address, name="liar", auto=False, reports=False) as liar,
        FakeGateway(address) as gateway,
    ):
        await gateway.submit(1, spec([3]))
        await until(lambda: liar.live)
        (handle,) = liar.live
        async with FakeEngine(address, name="honest"):
            await gateway.submit(2, spec([4], max_tokens=LONG))
            tokens = [900] * (1 << 20)
            huge = common_pb2.StepOutput(handles=[handle], token_counts=[len(tokens)], token_ids=tokens)
            await liar.send(step=huge)
            await gateway.ended(1, 2)
            assert gateway.ends[1].error.code == common_pb2.ERROR_CODE_ENGINE_LOST
            assert gateway.tokens[2] == expected([4], max_tokens=LONG)
            assert len(router.fleet) == 1
        assert router.admission.live_sequences == 0


async def test_reports_that_go_backwards_in_every_counter_change_no_count(monkeypatch):
    async with (
        running_router(monkeypatch) as (router, address),
        FakeEngine(address, auto=False, reports=False) as engine,
        FakeGateway(address) as gateway,
    ):
        await gateway.submit(1, spec([3], max_tokens=4))
        await until(lambda: engine.live)
        (attached,) = router.fleet
        await engine.report(sequence=5, running=1, steps=100, generated_tokens=50, used_blocks=7)
        await until(lambda: engine.renewed == 5)
        for sequence in (4, 1, 5):
            await engine.report(sequence=sequence, running=900, steps=1)
        await engine.report(sequence=6, running=1, steps=3, generated_tokens=2, used_blocks=2)
        await until(lambda: engine.renewed == 6)
        assert (attached.report.running, attached.report.used_blocks) == (1, 2)
        assert attached.placed_sequences == 1
        await engine.step(4)
        await gateway.ended(1)
        assert gateway.tokens[1] == expected([3], max_tokens=4)
        assert attached.placed_sequences == router.admission.live_sequences == 0


async def test_an_engine_that_attaches_again_and_again_leaves_one_attachment(monkeypatch):
    async with (
        running_router(monkeypatch) as (router, address),
        FakeEngine(address, name="honest"),
        FakeGateway(address) as gateway,
    ):
        await gateway.submit(1, spec([3], max_tokens=LONG))
        twins = [FakeEngine(address, name="twin", instance_id="twin", auto=False) for _ in range(30)]
        for twin in twins:
            await twin.__aenter__()
        for twin in twins[:-1]:
            assert await twin.call.code() == grpc.StatusCode.UNAVAILABLE
        assert len(router.fleet) == 2
        epochs = [twin.attached.lease_epoch for twin in twins]
        assert epochs == sorted(set(epochs))
        # It has shown that its link is bad: the honest one gets what comes.
        for handle in range(2, 12):
            await gateway.submit(handle, spec([handle]))
        await gateway.ended(*range(1, 12))
        assert not gateway.refusals
        assert all(gateway.tokens[handle] == expected([handle]) for handle in range(2, 12))
        for twin in twins:
            await twin.kill()
        await until(lambda: len(router.fleet) == 1)


async def test_the_wall_clock_may_jump(monkeypatch):
    jumps = itertools.cycle([0.0, 4e8, -4e8, 86_400.0])
    real = time.time
    async with (
        running_router(monkeypatch) as (router, address),
        FakeEngine(address, name="a"),
        FakeGateway(address) as gateway,
    ):
        monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
        for handle in range(20):
            await gateway.submit(handle, spec([handle + 1], max_tokens=60))
            if handle == 10:
                late = await FakeEngine(address, name="late").__aenter__()
        await gateway.ended(*range(20))
        assert not gateway.refusals
        for handle in range(20):
            assert gateway.tokens[handle] == expected([handle + 1], max_tokens=60)
        assert len(router.fleet) == 2
        await late.kill()


async def _session(stub, reading: bool) -> grpc.StatusCode:
    """Open a session and stay until it ends. Returns how it ended."""
    call = stub.Session()
    hello = router_pb2.SessionHello(
        schema_revision=SCHEMA_REVISION, minimum_peer_revision=MINIMUM_PEER_REVISION, instance_id="crowd"
    )
    try:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(router_pb2.SessionRequest(hello=hello))
            while await call.read() is not grpc.aio.EOF:
                if not reading:
                    await asyncio.sleep(3600)
        code: grpc.StatusCode = await call.code()
        return code
    finally:
        call.cancel()


@pytest.mark.parametrize("sessions", [600, pytest.param(10_000, marks=pytest.mark.long)])
async def test_a_client_that_opens_thousands_of_sessions(monkeypatch, sessions):
    most = 32
    async with (
        running_router(monkeypatch, max_sessions=most, lease_ms=120_000) as (router, address),
        FakeEngine(address),
        FakeGateway(address) as gateway,
        open_channel(address, secret=CLIENT_SECRET) as channel,
    ):
        await gateway.submit(1, spec([3], max_tokens=LONG))
        stub = router_pb2_grpc.RouterServiceStub(channel)
        crowd = [asyncio.create_task(_session(stub, reading=number % 2 == 0)) for number in range(sessions)]
        # All but those that found a place are refused: here, or by gRPC's own limit of streams.
        await until(lambda: sum(task.done() for task in crowd) == sessions - (most - 1), timeout_s=120)
        codes = {task.result() for task in crowd if task.done()}
        assert grpc.StatusCode.RESOURCE_EXHAUSTED in codes
        await gateway.ended(1)
        await gateway.submit(2, spec([4]))
        await gateway.ended(2)
        assert gateway.tokens == {1: expected([3], max_tokens=LONG), 2: expected([4])}
        for task in crowd:
            task.cancel()
        await asyncio.wait(crowd)
        await until(lambda: len(router.sessions) == 1)
