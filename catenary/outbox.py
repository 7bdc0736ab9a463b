"""The outbox of one stream: what waits for its peer, in lanes, merged where the peer reads slowly.

Lanes are pure. `Outbox` adds the waiting: of the writer for something to send, of a producer for room.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

from catenary.columns import StepRow, take_message
from catenary.v1 import common_pb2

M = TypeVar("M")
M_co = TypeVar("M_co", covariant=True)


class Lane(Protocol[M_co]):
    """A queue of messages that are equally urgent."""

    def __len__(self) -> int:
        """Return the number of entries that wait: messages, or what is merged into one later."""

    def pop(self) -> M_co:
        """Return the next message, which waits no more. The lane is not empty."""

    def clear(self) -> None:
        """Drop everything that waits."""


class Messages(Generic[M]):
    """Messages in the order in which they were put. One with a key replaces the waiting one with that key, in
    its place: the latest counts."""

    def __init__(self) -> None:
        # A plain dict would search past the entries that were taken from its front.
        self._waiting: OrderedDict[Hashable, M] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, message: M, key: Hashable = None) -> None:
        """Queue a message; without a key it replaces none."""
        self._waiting[object() if key is None else key] = message

    def take_back(self, key: Hashable) -> bool:
        """Drop the message with this key. Return False if none waits: it was sent, or never put."""
        return self._waiting.pop(key, None) is not None

    def pop(self) -> M:
        """See Lane."""
        return self._waiting.popitem(last=False)[1]

    def clear(self) -> None:
        """See Lane."""
        self._waiting.clear()


class Steps(Generic[M]):
    """Rows of a StepOutput by handle. Rows of later steps merge into the waiting row of their sequence.

    First rows of sequences go before the others, in a message of their own: a client waits for its first
    token, and one row takes the peer less time than all rows of a step. `wrap` makes the stream's message of
    a StepOutput. The size is bounded by the tokens of live sequences and the rows that ended.
    """

    def __init__(self, wrap: Callable[[common_pb2.StepOutput], M]) -> None:
        self._wrap = wrap
        self._rows: dict[int, StepRow] = {}
        self._first_rows: dict[int, StepRow] = {}

    def __len__(self) -> int:
        return len(self._first_rows) + len(self._rows)

    @property
    def has_first(self) -> bool:
        """Whether the next message is one of first rows."""
        return bool(self._first_rows)

    def row(self, handle: int, *, first: bool = False) -> StepRow:
        """Return the waiting row of a sequence, made if there is none. `first`: it had no row before."""
        row = self._first_rows.get(handle) or self._rows.get(handle)
        if row is None:
            rows = self._first_rows if first else self._rows
            row = rows[handle] = StepRow(handle)
        return row

    def add(self, row: StepRow, *, first: bool = False) -> None:
        """Merge a row into the waiting one of its handle, or keep it as that one."""
        held = self._first_rows.get(row.handle) or self._rows.get(row.handle)
        if held is not None:
            held.append(row)
            held.end = row.end or held.end
        elif first:
            self._first_rows[row.handle] = row
        else:
            self._rows[row.handle] = row

    def pop(self) -> M:
        """Return a message of all rows of one kind, or of as many as one of moderate size holds."""
        return self._wrap(take_message(self._first_rows or self._rows))

    def clear(self) -> None:
        """See Lane."""
        self._first_rows.clear()
        self._rows.clear()


class Outbox(Generic[M]):
    """Lanes of messages for one peer: those of a lane go before all of the later lanes.

    Producers put messages from the event loop and never wait for the peer. A producer whose messages add up
    stops at `full`, or waits for `room`, which is there while less than `limit` entries are unread. One
    writer takes the messages, with `next` one by one, or with `take` all that wait.
    """

    def __init__(self, *lanes: Lane[M], limit: int | None = None) -> None:
        self._lanes = lanes
        self._limit = limit
        self._closed = False
        self._dropped = False
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()

    @property
    def empty(self) -> bool:
        """Whether no message waits."""
        return not any(self._lanes)

    @property
    def unread(self) -> int:
        """Entries that count against the limit."""
        return sum(map(len, self._lanes))

    @property
    def full(self) -> bool:
        """Whether as much is unread as may be."""
        return self._limit is not None and self.unread >= self._limit

    @property
    def closed(self) -> bool:
        """Whether the stream is to end."""
        return self._closed

    def put(self, lane: Messages[M], message: M, key: Hashable = None) -> None:
        """Queue a message in one of the lanes, and wake the writer."""
        lane.put(message, key)
        self._wake.set()

    def wake(self) -> None:
        """Let the writer send what was added to a lane itself."""
        self._wake.set()

    def drained(self) -> None:
        """Let a producer that waits for room look again: less is unread than before."""
        self._drained.set()

    def clear(self) -> None:
        """Drop everything that waits."""
        for lane in self._lanes:
            lane.clear()
        self._drained.set()

    def close(self, *, flush: bool = False) -> None:
        """End the stream, after what waits with `flush`, else without another message."""
        self._closed = True
        if not flush:
            self._dropped = True
            self.clear()
        self._wake.set()
        self._drained.set()

    async def ready(self) -> None:
        """Wait until there is something to take, or the outbox is closed."""
        await self._wake.wait()

    async def room(self) -> None:
        """Wait until less is unread than the limit, or the outbox is closed."""
        while self.full and not self._closed:
            self._drained.clear()
            await self._drained.wait()

    async def next(self) -> M | None:
        """Wait for the next message and return it; None at the end of a closed outbox."""
        while (message := self.pop()) is None:
            if self._closed:
                return None
            self._wake.clear()
            await self._wake.wait()
        return message

    def pop(self) -> M | None:
        """Return the next message, or None if none waits."""
        if self._dropped:
            return None
        for lane in self._lanes:
            if lane:
                self._drained.set()
                return lane.pop()
        return None

    def take(self) -> list[M]:
        """Return all messages that wait, in order."""
        if not self._closed:
            self._wake.clear()
        messages = []
        while (message := self.pop()) is not None:
            messages.append(message)
        return messages
