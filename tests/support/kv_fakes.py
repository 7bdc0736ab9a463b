"""PublishKv by hand: an engine that is attached by hand can tell what a real one must not."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import Any

from catenary.rpc import open_channel
from catenary.v1 import engine_pb2, engine_pb2_grpc
from tests.support.router_fakes import FakeEngine


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
    fields: list[dict[str, Any]] = [{kind: engine_pb2.KvNames(names=kinds[kind])} for kind in kinds]
    told = [engine_pb2.KvChange(**field) for field in fields]
    return engine_pb2.PublishKvRequest(changes=engine_pb2.KvChanges(first_number=first_number, changes=told))


def joined(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(16, "big") for number in numbers)
