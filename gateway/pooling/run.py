"""The documents of one request on the session: a window of them at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from catenary.v1 import common_pb2
from gateway.errors import ApiError, internal, timed_out
from gateway.link.inbox import Inbox, SequenceEnded
from gateway.link.session import Session

_FULL = 429


class DocumentRun:
    """Use as an async context manager: leaving it aborts what has not ended, whatever the reason.

    A document that finds the queues full waits until another one of this request has left them; the window
    is smaller then, and grows again slowly.
    """

    def __init__(
        self,
        specs: Sequence[common_pb2.SequenceSpec],
        session: Session,
        *,
        window: int,
        deadline: float,
    ) -> None:
        """`window`: documents that are submitted and have not ended. `deadline`: by the loop's clock."""
        self._specs = specs
        self._session = session
        self._most = self._window = float(window)
        self._deadline = deadline
        # A document gives no tokens; the limit is there to be passed.
        self._inbox = Inbox(1)
        self._live: dict[int, int] = {}
        self._pending = deque(range(len(specs)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._live.values():
            self._session.abort(handle)

    def interrupt(self, error: Exception) -> None:
        """Make `vectors` raise."""
        self._inbox.interrupt(error)

    async def vectors(self) -> list[bytes]:
        """The documents' vectors, in order. Raises ApiError, or the error of `interrupt`."""
        found = [b""] * len(self._specs)
        self._fill()
        try:
            async with asyncio.timeout_at(self._deadline):
                while self._live:
                    for feed in await self._inbox.wait():
                        self._take(feed.index, feed.take().end, found)
                    self._fill()
        except TimeoutError:
            raise timed_out("The request took longer than the server allows.") from None
        return found

    def _take(self, index: int, end: SequenceEnded | None, found: list[bytes]) -> None:
        if end is None or index not in self._live:
            return
        del self._live[index]
        if end.error is not None:
            self._wait_for_room(index, end.error)
            return
        if not end.vector:
            raise internal()
        found[index] = end.vector
        self._window = min(self._most, self._window + 1 / self._window)

    def _fill(self) -> None:
        while self._pending and len(self._live) + 1 <= self._window:
            index = self._pending.popleft()
            try:
                self._live[index] = self._session.submit(self._specs[index], self._inbox.feed(index))
            except ApiError as error:
                self._wait_for_room(index, error)

    def _wait_for_room(self, index: int, error: ApiError) -> None:
        """Puts a document back. Raises `error` unless queues are full and others of this request in them."""
        if error.status != _FULL or not self._live:
            raise error
        self._pending.appendleft(index)
        self._window = float(len(self._live))
