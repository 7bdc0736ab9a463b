"""What a real router knows of the prefix caches of engines: honest ones, and ones that lie."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest

from catenary.blockhash import BlockHashes
from catenary.rpc import open_channel
from catenary.v1 import engine_pb2, engine_pb2_grpc
from services.engine.scripted import Script, ScriptedCapacity
from services.engine.servicer import KvOutbox
from tests.integration.router_fakes import FakeEngine, FakeGateway, expected, running_router, spec, until
from tests.support.fleet import Fleet
from tests.support.specs import expected_tokens, sequence_spec
from tests.support.waiting import eventually

CACHING = Script(capacity=ScriptedCapacity(block_size=4, prefix_caching=True))
PROMPT = list(range(10, 30))
FAST_KV: dict[str, Any] = {"kv_publish_interval_s": 0.01, "kv_resync_interval_s": 0.0}


def block_names(prompt: list[int], generated: int) -> list[bytes]:
    """Names of the blocks that a sequence leaves, in order."""
    hashes = BlockHashes(4)
    hashes.extend([*prompt, *expected_tokens(prompt, generated)][:-1])
    return hashes.hashes


async def known(fleet: Fleet) -> dict[str, tuple[int, bool]]:
    """By engine: blocks that the router knows of, and whether it knows all."""
    view = await fleet.view()
    return {engine.engine_name: (engine.indexed_blocks, engine.index_complete) for engine in view.engines}


async def test_what_an_engine_caches_is_in_the_index_of_every_router(start_fleet, secrets, run_dir):
    fleet = await start_fleet(engines=2, script=CACHING, **FAST_KV)
    (run_dir / "b").mkdir()
    other = Fleet(run_dir / "b", secrets)
    await other.start(engines=0)
    try:
        both = [fleet.router_address, other.router_address]
        options = {"listen": (f"unix:{run_dir}/both.sock",), "engine_name": "both"}
        engine = await fleet.add_engine(script=CACHING, routers=both, **options, **FAST_KV)
        await fleet.serving(3)
        await other.serving(1)
        tokens, _ = await other.answer(sequence_spec(PROMPT, max_tokens=9))
        assert tokens == expected_tokens(PROMPT, 9)
        names = block_names(PROMPT, 9)
        for router in (fleet.router, other.router):
            (attached,) = (each for each in router.fleet if each.instance_id == engine.instance_id)
            held = {attached: len(names)}
            await eventually(lambda r=router, held=held: r.kv_index.match(names) == held, "the blocks")
        view = await known(fleet)
        assert view.pop("both") == (len(names), True)
        await eventually(
            lambda: all(fleet.router.kv_index.complete(each) for each in fleet.router.fleet), "all"
        )
        assert set((await known(fleet)).values()) == {(0, True), (len(names), True)}
    finally:
        await other.stop()


async def test_blocks_that_are_given_up_leave_the_index(start_fleet):
    small = Script(capacity=ScriptedCapacity(block_size=4, total_blocks=8, prefix_caching=True))
    fleet = await start_fleet(script=small, **FAST_KV)
    for first in range(100, 600, 100):
        prompt = list(range(first, first + 20))
        assert (await fleet.answer(sequence_spec(prompt, max_tokens=5)))[0] == expected_tokens(prompt, 5)
        names = block_names(prompt, 5)
        (engine,) = fleet.router.fleet
        index = fleet.router.kv_index
        await eventually(lambda: index.match(names).get(engine) == len(names), "its blocks")  # noqa: B023
        assert index.blocks(engine) <= 8
        assert index.complete(engine)


async def test_a_restarted_or_lost_engine_is_forgotten(start_fleet):
    fleet = await start_fleet(script=CACHING, **FAST_KV)
    index, (engine,) = fleet.router.kv_index, fleet.router.fleet
    await fleet.answer(sequence_spec(PROMPT, max_tokens=9))
    await eventually(lambda: index.blocks(engine) == len(block_names(PROMPT, 9)), "the blocks")
    # The core restarts: its cache is new, the attachment is not.
    fleet.engines[0].faults.crash()
    await eventually(lambda: index.blocks(engine) == 0, "an empty cache")
    await fleet.serving(1)
    await fleet.answer(sequence_spec(PROMPT, max_tokens=9))
    await eventually(lambda: index.blocks(engine) and index.complete(engine), "the new core's blocks")
    # The stream is lost: another attachment tells all again.
    fleet.engines[0].drop_streams()
    await eventually(lambda: engine not in list(fleet.router.fleet), "the end of the attachment")
    assert index.blocks(engine) == 0
    await fleet.serving(1)
    (again,) = fleet.router.fleet
    await eventually(lambda: index.blocks(again) == len(block_names(PROMPT, 9)), "the blocks")
    await fleet.engines[0].stop()
    await eventually(lambda: index.pairs == 0, "nothing that is known")


async def test_changes_that_get_lost_are_found_and_made_good(start_fleet, monkeypatch):
    fleet = await start_fleet(script=CACHING, **FAST_KV)
    index, (engine,) = fleet.router.kv_index, fleet.router.fleet
    await eventually(lambda: index.complete(engine), "the first snapshot")
    changes, lost = KvOutbox._changes, []

    def lossy(outbox):
        messages = list(changes(outbox))
        if not lost:
            lost.extend(messages)
            return iter(())
        return iter(messages)

    monkeypatch.setattr(KvOutbox, "_changes", lossy)
    await fleet.answer(sequence_spec(PROMPT, max_tokens=9))
    await eventually(lambda: lost, "a message that is lost")
    other = [number + 100 for number in PROMPT]
    await fleet.answer(sequence_spec(other, max_tokens=9))
    for prompt in (PROMPT, other):
        names = block_names(prompt, 9)
        held = {engine: len(names)}
        await eventually(lambda names=names, held=held: index.match(names) == held, "all blocks")
    assert index.complete(engine)
    assert fleet.router.fleet.find(engine.instance_id) is engine


async def test_whatever_happens_the_index_comes_to_what_the_engines_hold(start_fleet):
    """Cores that die, attachments that break, snapshots in between, caches that are far too small."""
    small = Script(capacity=ScriptedCapacity(block_size=4, total_blocks=24, prefix_caching=True))
    fleet = await start_fleet(engines=3, script=small, kv_publish_queue=6, **FAST_KV)
    index, rng = fleet.router.kv_index, random.Random(5)

    async def ask() -> None:
        prompt = [rng.randrange(3)] * rng.randrange(4, 40)
        # The engine may be lost meanwhile, which is another test's matter.
        with suppress(grpc.aio.AioRpcError):
            await fleet.answer(sequence_spec(prompt, max_tokens=rng.randrange(1, 12)))

    for _ in range(12):
        asked = [asyncio.create_task(ask()) for _ in range(6)]
        engine = rng.choice(fleet.engines)
        match rng.randrange(4):
            case 0:
                engine.faults.crash()
            case 1:
                engine.drop_streams()
            case 2:
                for outbox in engine.app.hub.kv._outboxes:
                    outbox.renew()
        await asyncio.gather(*asked)
        await fleet.serving(3)
    held = {engine.instance_id: engine.app.hub.kv for engine in fleet.engines}

    def agrees() -> bool:
        for engine in fleet.router.fleet:
            names = held[engine.instance_id].names()
            if names is None or len(names) != index.blocks(engine) or not index.complete(engine):
                return False
            if any(engine not in index.match([name]) for name in names):
                return False
        return True

    await eventually(agrees, "an index of what the engines hold")
    assert index.pairs == sum(len(board.names()) for board in held.values()) > 0


@asynccontextmanager
async def publishing(engine: FakeEngine, **hello: Any):
    """An open PublishKv stream of an engine, its hello sent."""
    attached = engine.attached
    assert attached is not None
    fields = {
        "instance_id": engine.instance_id,
        "lease_epoch": attached.lease_epoch,
        "block_size": 32,
        **hello,
    }
    async with open_channel(engine.address, secret=engine.secret) as channel:
        call = engine_pb2_grpc.FleetServiceStub(channel).PublishKv()
        await call.write(engine_pb2.PublishKvRequest(hello=engine_pb2.KvHello(**fields)))
        yield call


def snapshot(*numbers: int, number: int = 0, first: bool = True, last: bool = True) -> Any:
    part = engine_pb2.KvSnapshot(number=number, names=joined(*numbers), first=first, last=last)
    return engine_pb2.PublishKvRequest(snapshot=part)


def changes(first_number: int, **kinds: bytes) -> Any:
    told = [engine_pb2.KvChange(**{kind: engine_pb2.KvNames(names=kinds[kind])}) for kind in kinds]
    return engine_pb2.PublishKvRequest(changes=engine_pb2.KvChanges(first_number=first_number, changes=told))


def joined(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(16, "big") for number in numbers)


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
            assert index.match([joined(9)]) == {engine: 1}
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
            assert router.kv_index.match([joined(1)]) == {engine: 1}


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
