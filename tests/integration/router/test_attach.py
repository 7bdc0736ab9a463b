"""Attach: which engines are admitted, under which epoch, and the end of one that breaks the contract."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from catenary.rpc import error_of, open_channel
from catenary.schema import SCHEMA_REVISION
from catenary.v1 import common_pb2, engine_pb2, engine_pb2_grpc, router_pb2, router_pb2_grpc
from tests.support.overtaken import overtaken
from tests.support.router_fakes import (
    CLIENT_SECRET,
    ENGINE_SECRET,
    MODEL,
    VOCAB,
    FakeEngine,
    FakeGateway,
    expected,
    running_router,
    spec,
    until,
)


async def read_to_the_end(call):
    while await call.read() is not grpc.aio.EOF:
        pass


async def refusal_of(engine):
    while True:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await engine.__aenter__()
        if not overtaken(caught.value):
            return caught.value


async def test_another_schema_is_refused_with_both_revisions(monkeypatch):
    async with running_router(monkeypatch) as (router, address):
        for fields in (
            {"schema_revision": 0, "minimum_peer_revision": 0},
            {"schema_revision": 7, "minimum_peer_revision": 7},
        ):
            refusal = await refusal_of(FakeEngine(address, **fields))
            assert refusal.code() == grpc.StatusCode.FAILED_PRECONDITION
            assert error_of(refusal).code == common_pb2.ERROR_CODE_SCHEMA_MISMATCH
            assert f"schema revision {SCHEMA_REVISION}" in refusal.details()
            assert f"speaks {fields['schema_revision']}" in refusal.details()
        assert len(router.fleet) == 0


@pytest.mark.parametrize(
    ("secret", "status"),
    [
        (None, grpc.StatusCode.UNAUTHENTICATED),
        ("wrong", grpc.StatusCode.UNAUTHENTICATED),
        (CLIENT_SECRET, grpc.StatusCode.PERMISSION_DENIED),
    ],
)
async def test_who_is_no_engine_may_not_attach(monkeypatch, secret, status):
    async with running_router(monkeypatch) as (router, address):
        assert (await refusal_of(FakeEngine(address, secret=secret))).code() == status
        assert len(router.fleet) == 0


async def test_bad_hellos_are_refused(monkeypatch):
    async with running_router(monkeypatch, max_engines=2, hello_timeout_s=0.3) as (router, address):
        nameless = common_pb2.ModelInfo(max_model_len=10, vocab_size=5)
        shapeless = common_pb2.ModelInfo(name=MODEL)
        for model in (nameless, shapeless):
            refusal = await refusal_of(FakeEngine(address, model=model))
            assert refusal.code() == grpc.StatusCode.INVALID_ARGUMENT
        async with FakeEngine(address, name="a"):
            other = common_pb2.ModelInfo(name=MODEL, max_model_len=10, vocab_size=5)
            refusal = await refusal_of(FakeEngine(address, name="b", model=other))
            assert "vocabulary" in refusal.details()
            async with FakeEngine(address, name="c"):
                refusal = await refusal_of(FakeEngine(address, name="d"))
                assert "max-engines" in refusal.details()
        async with open_channel(address, secret="engine-secret") as channel:
            silent = engine_pb2_grpc.FleetServiceStub(channel).Attach()
            assert await silent.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: len(router.fleet) == 0)


async def test_reports_renew_the_lease_and_one_that_goes_back_changes_nothing(monkeypatch):
    async with (
        running_router(monkeypatch) as (router, address),
        FakeEngine(address, auto=False, reports=False) as engine,
    ):
        assert engine.attached.lease_ms == 2000
        assert engine.attached.report_interval_ms == 100
        assert engine.attached.router_instance_id == router.instance_id
        await engine.report(sequence=5, running=3)
        await until(lambda: engine.renewed == 5)
        await engine.report(sequence=4, running=99)
        await until(lambda: engine.renewed == 4)
        assert next(iter(router.fleet)).report.running == 3


async def test_a_stale_epoch_is_refused(monkeypatch):
    async with (
        running_router(monkeypatch) as (router, address),
        FakeEngine(address, auto=False, reports=False) as engine,
        FakeGateway(address) as gateway,
    ):
        await gateway.submit(1, spec([1]))
        await until(lambda: engine.live)
        await engine.send(load=engine_pb2.LoadReport(sequence=1), lease_epoch=engine.attached.lease_epoch + 1)
        await gateway.ended(1)
        assert gateway.ends[1].error.code == common_pb2.ERROR_CODE_ENGINE_LOST
        assert await engine.call.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert "epoch" in await engine.call.details()
        assert len(router.fleet) == 0


@pytest.mark.parametrize("state", [engine_pb2.ENGINE_STATE_UNSPECIFIED, 42])
async def test_an_engine_in_a_state_that_does_not_exist_is_given_up(monkeypatch, state):
    async with (
        running_router(monkeypatch) as (router, address),
        FakeEngine(address, auto=False, reports=False) as engine,
    ):
        await engine.send(load=engine_pb2.LoadReport(sequence=1, state=state))
        assert await engine.call.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert len(router.fleet) == 0


async def test_a_hello_with_a_million_end_tokens_is_refused_and_told_to_nobody(monkeypatch):
    async with running_router(monkeypatch) as (_, address), FakeGateway(address) as gateway:
        model = common_pb2.ModelInfo(
            name=MODEL, max_model_len=10, vocab_size=5, eos_token_ids=[1] * 1_000_000
        )
        refusal = await refusal_of(FakeEngine(address, model=model))
        assert error_of(refusal).param == "eos_token_ids"
        async with FakeEngine(address):
            await until(lambda: gateway.serving() == 1)
        assert all(update.ByteSize() < 200 for _, update in gateway.updates)


async def test_the_same_engine_attached_twice_replaces_itself(monkeypatch):
    async with (
        running_router(monkeypatch) as (router, address),
        FakeEngine(address, auto=False) as older,
        FakeGateway(address) as gateway,
    ):
        await gateway.submit(1, spec([1]))
        await until(lambda: older.live)
        async with FakeEngine(address) as newer:
            assert newer.attached.lease_epoch > older.attached.lease_epoch
            await gateway.ended(1)
            assert gateway.ends[1].error.code == common_pb2.ERROR_CODE_DRAINING
            assert await older.call.code() == grpc.StatusCode.UNAVAILABLE
            assert len(router.fleet) == 1
            await gateway.submit(2, spec([2]))
            await gateway.ended(2)
            assert gateway.tokens[2] == expected([2])


@pytest.mark.parametrize(
    "lie",
    [
        common_pb2.StepOutput(handles=[1], token_counts=[2], token_ids=[5]),
        common_pb2.StepOutput(handles=[1, 2], token_counts=[1], token_ids=[5]),
        common_pb2.StepOutput(
            handles=[1],
            token_counts=[1],
            token_ids=[5],
            ends=[common_pb2.SequenceEnd(row=3, reason=common_pb2.FINISH_REASON_STOP)],
        ),
        common_pb2.StepOutput(
            handles=[1], token_counts=[1], token_ids=[5], ends=[common_pb2.SequenceEnd(row=0)]
        ),
        common_pb2.StepOutput(
            handles=[1],
            token_counts=[1],
            token_ids=[5],
            logprobs=common_pb2.LogprobColumns(rows=[0], sampled=[0.0, 0.0]),
        ),
        common_pb2.StepOutput(
            handles=[1], token_counts=[1], token_ids=[5], logprobs=common_pb2.LogprobColumns(rows=[4])
        ),
        common_pb2.StepOutput(handles=[1], token_counts=[5000], token_ids=[5] * 5000),
        common_pb2.StepOutput(handles=[1], token_counts=[1], token_ids=[VOCAB]),
        common_pb2.StepOutput(handles=[1, 1], token_counts=[1, 1], token_ids=[5, 5]),
    ],
)
async def test_an_engine_that_breaks_the_contract_is_given_up(monkeypatch, lie):
    async with (
        running_router(monkeypatch) as (router, address),
        FakeEngine(address, name="liar", auto=False, reports=False) as liar,
        FakeGateway(address) as gateway,
    ):
        await gateway.submit(1, spec([1]))
        await until(lambda: liar.live)
        assert list(liar.live) == [1]
        async with FakeEngine(address, name="honest") as honest:
            await gateway.submit(2, spec([2], max_tokens=200))
            await until(lambda: honest.submitted)
            await liar.send(step=lie)
            await gateway.ended(1, 2)
            assert gateway.ends[1].error.code == common_pb2.ERROR_CODE_ENGINE_LOST
            assert await liar.call.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert gateway.tokens[2] == expected([2], max_tokens=200)
            assert router.admission.live_sequences == 0


async def test_rows_of_unknown_sequences_are_ignored(monkeypatch):
    async with (
        running_router(monkeypatch) as (router, address),
        FakeEngine(address, auto=False) as engine,
        FakeGateway(address) as gateway,
    ):
        await gateway.submit(1, spec([1], max_tokens=2))
        await until(lambda: engine.live)
        stray = common_pb2.StepOutput(
            handles=[777], token_counts=[1], token_ids=[5], ends=[{"row": 0, "reason": 1}]
        )
        await engine.send(step=stray)
        await engine.send(refusal=common_pb2.Refusal(handle=778))
        await engine.send(abort_result=engine_pb2.AbortResult(handle=779))
        await engine.step(2)
        await gateway.ended(1)
        assert gateway.tokens == {1: expected([1], max_tokens=2)}
        assert router.admission.live_sequences == 0


async def test_an_engine_that_does_not_read_is_given_up(monkeypatch):
    long = common_pb2.ModelInfo(name=MODEL, max_model_len=1 << 20, vocab_size=VOCAB)
    async with (
        running_router(monkeypatch, lease_ms=400, report_interval_ms=50, unserved_wait_s=0) as (
            router,
            address,
        ),
        FakeEngine(address, auto=False, total_blocks=1 << 20, model=long) as engine,
        FakeGateway(address) as gateway,
    ):
        engine.stop_reading()
        for handle in range(40):
            await gateway.submit(handle, spec([900] * 200_000))
        await gateway.ended(*range(40))
        assert {end.error.code for end in gateway.ends.values()} == {common_pb2.ERROR_CODE_ENGINE_LOST}
        await until(lambda: len(router.fleet) == 0)
        assert router.admission.live_sequences == 0


async def test_many_engines_come_and_go_without_a_trace(monkeypatch):
    async with running_router(monkeypatch) as (router, address), FakeGateway(address) as gateway:
        for round_number in range(5):
            engines = [FakeEngine(address, name=f"e{round_number}-{n}", auto=False) for n in range(6)]
            await asyncio.gather(*[engine.__aenter__() for engine in engines])
            base = round_number * 100
            for handle in range(base, base + 12):
                await gateway.submit(handle, spec([1]))
            await until(lambda e=engines: sum(len(engine.live) for engine in e) == 12)
            await asyncio.gather(*[engine.kill() for engine in engines])
            await gateway.ended(*range(base, base + 12))
            await until(lambda: len(router.fleet) == 0)
        assert router.admission.live_sequences == router.admission.live_tokens == 0


async def test_reports_of_any_size_stop_neither_updates_nor_answers(monkeypatch):
    most = (1 << 32) - 1
    async with (
        running_router(monkeypatch, heartbeat_s=0.2) as (_, address),
        FakeGateway(address) as gateway,
        FakeEngine(address, name="a", auto=False, reports=False) as first,
        FakeEngine(address, name="b", auto=False, reports=False) as second,
    ):
        for engine in (first, second):
            await engine.report(running=most, waiting=most, used_blocks=most, total_blocks=most)
        await until(lambda: gateway.updates[-1][1].models[0].load.running == 2048)
        count = len(gateway.updates)
        await until(lambda: len(gateway.updates) > count + 2)
        stub = router_pb2_grpc.RouterServiceStub(gateway.channel)
        models = (await stub.ListModels(router_pb2.ListModelsRequest())).models
        assert models[0].load.total_blocks == 8192


@pytest.mark.parametrize("what", ["Attach", "Session"])
async def test_a_message_that_cannot_be_read_ends_the_stream_that_brought_it(monkeypatch, what, caplog):
    async with (
        running_router(monkeypatch) as (router, address),
        FakeEngine(address, auto=False) as engine,
        FakeGateway(address) as gateway,
    ):
        await gateway.submit(1, spec([1]))
        await until(lambda: engine.live)
        method = "FleetService/Attach" if what == "Attach" else "RouterService/Session"
        secret = ENGINE_SECRET if what == "Attach" else CLIENT_SECRET
        async with open_channel(address, secret=secret) as channel:
            call = channel.stream_stream(f"/catenary.v1.{method}")()
            if what == "Attach":
                hello = engine_pb2.AttachRequest(hello=FakeEngine(address, name="liar").hello())
            else:
                said = router_pb2.SessionHello(**gateway.hello_fields)
                hello = router_pb2.SessionRequest(hello=said)
            await call.write(hello.SerializeToString())
            await call.read()
            await call.write(b"\xff\xff\xff")
            with pytest.raises(grpc.aio.AioRpcError, match="cannot be read") as caught:
                await read_to_the_end(call)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        await engine.step(16)
        await gateway.ended(1)
        assert len(router.fleet) == 1
    assert "Traceback" not in caplog.text
