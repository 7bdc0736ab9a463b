"""Work that ends when its client hangs up."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

import pytest

from gateway.http.closing import HalfClosedClients
from gateway.http.request import ClientGone, ClientWatch


class Client:
    """A client that hangs up when it is told to."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, str]:
        """See ASGI."""
        await self.left.wait()
        return {"type": "http.disconnect"}


async def forever() -> None:
    await asyncio.Event().wait()


async def test_work_that_ends_before_the_client_leaves() -> None:
    client = Client()
    async with ClientWatch(client.receive) as watch:
        assert await watch.run(asyncio.sleep(0, "done")) == "done"
        client.left.set()
        # Nobody is stopped any more who was watched before.
        for _ in range(5):
            await asyncio.sleep(0)


async def test_work_ends_with_its_client() -> None:
    client = Client()
    async with ClientWatch(client.receive) as watch:
        asyncio.get_running_loop().call_soon(client.left.set)
        with pytest.raises(ClientGone):
            await watch.run(forever())
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()
        with pytest.raises(ClientGone):
            await watch.run(forever())


async def test_a_cancel_from_elsewhere_stays_one() -> None:
    client = Client()

    async def work() -> None:
        async with ClientWatch(client.receive) as watch:
            await watch.run(forever())

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    both = asyncio.create_task(work())
    await asyncio.sleep(0)
    client.left.set()
    both.cancel()
    with pytest.raises(asyncio.CancelledError):
        await both


class Connection:
    """A transport whose client has sent all, and the cycle of its request."""

    def __init__(self, version: str = "1.1", *, reset: bool = False) -> None:
        self.scope = {"http_version": version}
        self.response_started = False
        self.written: list[bytes] = []
        self.aborted = False
        self.reset = reset

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def get_extra_info(self, name: str) -> Any:
        assert name == "socket"
        return self

    def getsockopt(self, level: int, option: int) -> int:
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_ERROR)
        return 104 if self.reset else 0


async def test_one_timer_looks_after_all_half_closed_connections() -> None:
    clients, loop = HalfClosedClients(), asyncio.get_running_loop()
    timers: list[Any] = []
    call_at = loop.call_at

    def counted(*args: Any, **options: Any) -> Any:
        timers.append(call_at(*args, **options))
        return timers[-1]

    loop.call_at = counted  # type: ignore[assignment, method-assign]
    try:
        connections = [Connection("1.0" if place % 2 else "1.1") for place in range(200)]
        for one in connections:
            clients.add(cast("Any", one), cast("Any", one))
        assert len(timers) == 1
        assert [len(one.written) for one in connections] == [1, 0] * 100
        gone = Connection(reset=True)
        clients.add(cast("Any", gone), cast("Any", gone))
        assert gone.aborted
        connections[0].reset = True
        connections[1].response_started = True
        clients.discard(cast("Any", connections[2]))
        async with asyncio.timeout(20):
            while not connections[0].aborted or len(clients) > 197:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.005)
        assert len(clients) == 197
        assert sum(not timer.cancelled() and timer.when() > loop.time() for timer in timers) <= 1
        for one in connections:
            clients.discard(cast("Any", one))
        assert len(clients) == 0
        assert all(timer.cancelled() or timer.when() <= loop.time() for timer in timers)
    finally:
        del loop.call_at
