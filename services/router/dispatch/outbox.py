"""Messages that a gateway has not read yet: everything that can be merged is."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from catenary.columns import StepRow, take_message
from catenary.v1 import router_pb2


class SessionOutbox:
    """Outbox of one Session. The steps of all engines that arrive during a write become one message. What is
    the first of its sequence goes before that: for all rows of a step the gateway takes longer than everybody
    before it.

    Tokens of a sequence merge into its row, and updates of models and of what is shed replace one another.
    What still grows with each request (rows that ended, refusals, abort results) is bounded by the session's
    reader, which waits for `room` before it takes the next request.
    """

    def __init__(self, *, max_unread: int) -> None:
        self._max_unread = max_unread
        self._rows: dict[int, StepRow] = {}
        self._first_rows: dict[int, StepRow] = {}
        self._answers: deque[router_pb2.SessionResponse] = deque()
        self._models: router_pb2.ModelsUpdate | None = None
        self._shed: router_pb2.ShedState | None = None
        self._closed = False
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()

    @property
    def unread(self) -> int:
        """Messages and rows that wait."""
        return len(self._answers) + len(self._first_rows) + len(self._rows)

    def row(self, handle: int, *, first: bool = False) -> StepRow:
        """The waiting row of a sequence, made if there is none. `first`: nothing of it was written before."""
        row = self._first_rows.get(handle) or self._rows.get(handle)
        if row is None:
            rows = self._first_rows if first else self._rows
            row = rows[handle] = StepRow(handle)
            self._wake.set()
        return row

    def answer(self, response: router_pb2.SessionResponse) -> None:
        """Queue a refusal or an abort result."""
        self._answers.append(response)
        self._wake.set()

    def models(self, update: router_pb2.ModelsUpdate) -> None:
        """Queue an update; it replaces one that waits."""
        self._models = update
        self._wake.set()

    def shed(self, state: router_pb2.ShedState) -> None:
        """Queue what is shed; it replaces one that waits."""
        self._shed = state
        self._wake.set()

    async def room(self) -> None:
        """Wait until less is unread than the limit."""
        while self.unread >= self._max_unread and not self._closed:
            self._drained.clear()
            await self._drained.wait()

    def close(self, *, flush: bool = False) -> None:
        """End the stream, after what waits with `flush`, else dropping it."""
        self._closed = True
        if not flush:
            self._models = self._shed = None
            self._first_rows.clear()
            self._rows.clear()
            self._answers.clear()
        self._wake.set()
        self._drained.set()

    async def messages(self) -> AsyncIterator[router_pb2.SessionResponse]:
        """The messages to write until the outbox is closed and empty."""
        while True:
            self._wake.clear()
            while (message := self._next()) is not None:
                self._drained.set()
                yield message
            if self._closed:
                return
            if not self._wake.is_set():
                await self._wake.wait()

    def _next(self) -> router_pb2.SessionResponse | None:
        if self._answers:
            return self._answers.popleft()
        if self._models is not None:
            update, self._models = self._models, None
            return router_pb2.SessionResponse(models=update)
        if self._shed is not None:
            state, self._shed = self._shed, None
            return router_pb2.SessionResponse(shed=state)
        if self._first_rows:
            return router_pb2.SessionResponse(step=take_message(self._first_rows))
        if self._rows:
            return router_pb2.SessionResponse(step=take_message(self._rows))
        return None
