"""The PublishKv stream's task ends when it is told to, whatever happens to the stream at that moment."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from services.engine.link import CapacityFacts, CoreReady, ModelFacts
from services.engine.servicer import EngineFrontend, KvPublishing, SequenceLimits
from services.engine.servicer.attachment import KvStream

TERMS = KvPublishing(0.0, 10, 0.0, 0.001, 0.001, 60.0)


class Call:
    """A call that ends when the test says so."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.greeted = asyncio.Event()
        self.written: list[Any] = []

    async def write(self, message: Any) -> None:
        self.written.append(message)
        self.greeted.set()

    async def read(self) -> Any:
        await self.ended.wait()
        return grpc.aio.EOF

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def cancel(self) -> None:
        pass


class Stub:
    """Opens calls."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.opened = asyncio.Semaphore(0)

    def PublishKv(self) -> Call:
        self.calls.append(Call())
        self.opened.release()
        return self.calls[-1]


@pytest.mark.parametrize("turns", range(6))
async def test_a_stream_that_ends_does_not_swallow_the_cancellation(turns: int) -> None:
    frontend = EngineFrontend(
        stall_limit_s=1, limits=SequenceLimits(), remembered_handles=1, on_state=lambda _: None
    )
    frontend.ready = CoreReady(ModelFacts(10, 10, [], "float32", ""), CapacityFacts(4, 8, 1, 1, 10), True)
    stub: Any = Stub()
    task = asyncio.create_task(KvStream(stub, "engine", frontend, TERMS).run(1))
    await stub.opened.acquire()
    # Its tasks begin to read and write.
    await asyncio.sleep(0)
    stub.calls[-1].ended.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    async with asyncio.timeout(5):
        await asyncio.wait([task])
    assert task.cancelled()


async def test_a_stream_that_ends_is_opened_again() -> None:
    frontend = EngineFrontend(
        stall_limit_s=1, limits=SequenceLimits(), remembered_handles=1, on_state=lambda _: None
    )
    frontend.ready = CoreReady(ModelFacts(10, 10, [], "float32", ""), CapacityFacts(4, 8, 1, 1, 10), True)
    stub: Any = Stub()
    task = asyncio.create_task(KvStream(stub, "engine", frontend, TERMS).run(3))
    async with asyncio.timeout(5):
        for _ in range(3):
            await stub.opened.acquire()
            await stub.calls[-1].greeted.wait()
            stub.calls[-1].ended.set()
    assert {call.written[0].hello.lease_epoch for call in stub.calls} == {3}
    task.cancel()
    await asyncio.wait([task])
