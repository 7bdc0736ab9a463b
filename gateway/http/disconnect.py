"""Noticing that a client hung up, at any moment after its body was read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection and waits for no answer."""


class SlowReader(ClientGone):
    """The client left its answer unread for too long, and its connection was dropped."""


class ClientWatch:
    """Watches a request's connection from entry to exit."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._callbacks: list[Callable[[], None]] = []
        self._start: asyncio.Handle | None = None
        self._task: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def start(self) -> None:
        """Begin to watch, after the next step of this task: the client waits for that."""
        self._start = asyncio.get_running_loop().call_soon(self._begin)

    async def close(self) -> None:
        """Stop watching."""
        self._callbacks.clear()
        if self._start is not None:
            self._start.cancel()
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
        stop = _Stop(asyncio.current_task())
        self.on_gone(stop)
        try:
            return await work
        except asyncio.CancelledError:
            if stop.alone():
                raise ClientGone from None
            raise
        finally:
            if stop in self._callbacks:
                self._callbacks.remove(stop)

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue
        self._gone.set()
        for callback in self._callbacks:
            callback()


class _Stop:
    """Cancels a task, once."""

    def __init__(self, task: asyncio.Task[Any] | None) -> None:
        self._task = task
        self._called = False

    def __call__(self) -> None:
        if self._task is not None:
            self._called = self._task.cancel()

    def alone(self) -> bool:
        """Takes the cancel back. Whether it was the only one of the task."""
        return self._called and self._task is not None and not self._task.uncancel()
