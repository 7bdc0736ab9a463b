"""Noticing that a client hung up, at any moment after its body was read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection; nobody waits for an answer."""


class SlowReader(ClientGone):
    """The client left its answer unread for too long, and its connection was dropped."""


class ClientWatch:
    """Watches a request's connection from entry to exit."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._callbacks: list[Callable[[], None]] = []
        self._task: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop watching."""
        self._callbacks.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def on_gone(self, callback: Callable[[], None]) -> None:
        """Call back when the client hangs up (at once if it has)."""
        if self._gone.is_set():
            callback()
        else:
            self._callbacks.append(callback)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; it is cancelled, and ClientGone raised, if the client hangs up first."""
        task = asyncio.ensure_future(work)
        self.on_gone(lambda: _cancel(task))
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self._gone.is_set() and not (current is not None and current.cancelling()):
                raise ClientGone from None
            raise
        finally:
            if not task.done():
                task.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue
        self._gone.set()
        for callback in self._callbacks:
            callback()


def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
