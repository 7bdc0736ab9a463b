"""PublishKv streams of engines that lose count, and of some that lie: it costs them the stream alone."""

from __future__ import annotations

from contextlib import suppress

import grpc
import pytest

from catenary.rpc import open_channel
from catenary.v1 import engine_pb2, engine_pb2_grpc
from tests.support.kv_fakes import changes, joined, publishing, snapshot
from tests.support.kv_matched import matched
from tests.support.router_fakes import FakeEngine, FakeGateway, expected, running_router, spec, until


async def test_a_gap_is_answered_with_a_resync_and_the_snapshot_counts(monkeypatch):
    async with running_router(monkeypatch) as (router, address), FakeEngine(address) as fake:
        (engine,) = router.fleet
        index = router.kv_index
        async with publishing(fake) as call:
            await call.write(snapshot(1, 2, number=7))
            await call.write(changes(8, removed=joined(1), stored=joined(3, 4)))
            await until(lambda: index.blocks(engine) == 3)
            await call.write(changes(12, stored=joined(5)))
            assert (await call.read()).resync.last_number == 10
            assert (index.blocks(engine), index.complete(engine)) == (0, False)
            await call.write(snapshot(8, 9, number=12, last=False))
            await call.write(snapshot(10, number=12, first=False))
            await until(lambda: index.complete(engine))
            assert matched(index, [joined(9)]) == {engine: 1}
        await until(lambda: index.blocks(engine) == 0)
        assert len(router.fleet) == 1


@pytest.mark.parametrize(
    ("hello", "status"),
    [
        ({"lease_epoch": 99}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"lease_epoch": 0}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"instance_id": "nobody"}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"block_size": 16}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_who_is_not_attached_so_publishes_nothing(monkeypatch, hello, status):
    async with running_router(monkeypatch) as (router, address), FakeEngine(address) as fake:
        async with publishing(fake, **hello) as call:
            assert await call.code() == status
        assert router.kv_index.pairs == 0
        assert len(router.fleet) == 1


LIES = {
    "a name that is not whole": [engine_pb2.PublishKvRequest(snapshot=engine_pb2.KvSnapshot(names=b"short"))],
    "more blocks than it has": [snapshot(*range(4097))],
    "more, little by little": [
        snapshot(*range(4096)),
        changes(1, stored=joined(*range(5000, 5001))),
    ],
    "a huge message": [snapshot(*range(70_000))],
    "changes without end": [
        snapshot(),
        engine_pb2.PublishKvRequest(
            changes=engine_pb2.KvChanges(first_number=1, changes=[engine_pb2.KvChange(cleared=True)] * 2000)
        ),
    ],
    "a change of no kind": [
        snapshot(),
        engine_pb2.PublishKvRequest(
            changes=engine_pb2.KvChanges(first_number=1, changes=[engine_pb2.KvChange()])
        ),
    ],
    "a second hello": [engine_pb2.PublishKvRequest(hello=engine_pb2.KvHello(instance_id="instance-fake"))],
    "nothing": [engine_pb2.PublishKvRequest()],
    "gaps for ever": [snapshot(), changes(5), snapshot(), changes(7), snapshot(), changes(9)],
}


@pytest.mark.parametrize("lie", LIES)
async def test_an_engine_that_lies_loses_the_stream_and_no_sequence(monkeypatch, lie):
    async with (
        running_router(monkeypatch, max_kv_resyncs=2) as (router, address),
        FakeEngine(address, auto=False) as fake,
        FakeGateway(address) as gateway,
    ):
        (engine,) = router.fleet
        await gateway.submit(1, spec([1, 2, 3]))
        await until(lambda: fake.live)
        await fake.step()
        async with publishing(fake) as call:
            with suppress(grpc.aio.AioRpcError, grpc.aio.InternalError):
                for message in LIES[lie]:
                    await call.write(message)
                # A status comes behind what was not read.
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert (router.kv_index.pairs, router.kv_index.complete(engine)) == (0, False)
        await fake.step(100)
        await gateway.ended(1)
        assert gateway.tokens[1] == expected([1, 2, 3])
        assert list(router.fleet) == [engine]
        async with publishing(fake) as call:
            await call.write(snapshot(1))
            await until(lambda: router.kv_index.blocks(engine) == 1)


async def test_numbers_that_go_backwards_change_nothing(monkeypatch):
    async with running_router(monkeypatch) as (router, address), FakeEngine(address) as fake:
        (engine,) = router.fleet
        async with publishing(fake) as call:
            await call.write(snapshot(1, 2, number=20))
            await call.write(changes(3, removed=joined(1), stored=joined(3)))
            await call.write(changes(21, stored=joined(4)))
            await until(lambda: router.kv_index.blocks(engine) == 3)
            assert matched(router.kv_index, [joined(1)]) == {engine: 1}


async def test_a_second_stream_of_an_engine_takes_the_place_of_the_first(monkeypatch):
    async with running_router(monkeypatch) as (router, address), FakeEngine(address) as fake:
        (engine,) = router.fleet
        async with publishing(fake) as first:
            await first.write(snapshot(1, 2, 3))
            await until(lambda: router.kv_index.blocks(engine) == 3)
            async with publishing(fake) as second:
                await second.write(snapshot(1))
                assert await first.code() == grpc.StatusCode.UNAVAILABLE
                await until(lambda: router.kv_index.complete(engine))
                assert router.kv_index.blocks(engine) == 1


async def test_the_stream_ends_with_the_attachment(monkeypatch):
    async with running_router(monkeypatch) as (router, address), FakeEngine(address) as fake:
        (engine,) = router.fleet
        async with publishing(fake) as call:
            await call.write(snapshot(1, 2, 3))
            await until(lambda: router.kv_index.blocks(engine) == 3)
            async with FakeEngine(address) as newer:
                assert await call.code() == grpc.StatusCode.UNAVAILABLE
                assert router.kv_index.pairs == 0
                async with publishing(newer) as again:
                    await again.write(snapshot(4))
                    await until(lambda: router.kv_index.pairs == 1)
        await until(lambda: router.kv_index.pairs == 0)


async def test_a_report_that_counts_wrong_is_put_right(monkeypatch):
    async with (
        running_router(monkeypatch) as (router, address),
        FakeEngine(address, auto=False, reports=False) as fake,
    ):
        await fake.report(prompt_tokens=10, cached_prompt_tokens=99, preemptions=3)
        await until(lambda: fake.renewed == 1)
        (engine,) = router.fleet
        assert engine.report is not None
        assert (engine.report.prompt_tokens, engine.report.cached_prompt_tokens) == (10, 10)
        assert engine.report.preemptions == 3


async def test_a_client_may_not_publish(monkeypatch):
    async with (
        running_router(monkeypatch) as (_, address),
        open_channel(address, secret="client-secret") as channel,
    ):
        call = engine_pb2_grpc.FleetServiceStub(channel).PublishKv()
        assert await call.code() == grpc.StatusCode.PERMISSION_DENIED
