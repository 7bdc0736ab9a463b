"""Work that ends when its client hangs up."""

from __future__ import annotations

import asyncio

import pytest

from gateway.http.disconnect import ClientGone, ClientWatch


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
