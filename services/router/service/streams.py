"""The common parts of the long-lived streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from catenary.rpc import RpcError, refuse
from catenary.v1 import common_pb2, engine_pb2, router_pb2

INTERNAL = common_pb2.Error(
    code=common_pb2.ERROR_CODE_INTERNAL, message="The router failed because of an internal error."
)


M = TypeVar("M", router_pb2.SessionRequest, engine_pb2.AttachRequest, engine_pb2.PublishKvRequest)


SLOW_READER = common_pb2.Error(
    code=common_pb2.ERROR_CODE_SLOW_READER, message="The stream was not read for too long."
)


class Watched:
    """One stream's writes. `writing` before a message goes to gRPC, `written` once it went through."""

    __slots__ = ("_clock", "_on_stall", "_since", "_strikes")

    def __init__(self, on_stall: Callable[[int], None], clock: Callable[[], float]) -> None:
        self._on_stall = on_stall
        self._clock = clock
        self._since: float | None = None
        self._strikes = 0

    def writing(self) -> None:
        """A message is on its way."""
        self._since = self._clock()

    def written(self) -> None:
        """It left."""
        self._since = None
        self._strikes = 0

    def check(self, limit_s: float) -> None:
        """Call `on_stall(n)` when a write has lasted n limits, once for each n."""
        if self._since is not None and self._clock() - self._since > limit_s * (self._strikes + 1):
            self._strikes += 1
            self._on_stall(self._strikes)


class ReaderWatch:
    """All watched streams of one kind and their limit in seconds."""

    def __init__(self, limit_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._watched: set[Watched] = set()

    def __len__(self) -> int:
        return len(self._watched)

    def add(self, on_stall: Callable[[int], None]) -> Watched:
        """Watch a stream. `on_stall` gets 1, 2, ... as its stuck write passes that many limits."""
        watched = Watched(on_stall, self._clock)
        self._watched.add(watched)
        return watched

    def remove(self, watched: Watched) -> None:
        """Stop watching. Idempotent."""
        self._watched.discard(watched)

    def sweep(self) -> None:
        """Check all streams."""
        for watched in list(self._watched):
            watched.check(self._limit_s)


class Cut:
    """Ends the handler that made it from outside, when it is stuck in a write and can be told nothing.

    gRPC sends no status for a handler that was merely cancelled; the peer would wait for ever. The handler
    therefore calls `explain` when it is closed, and the call ends with a status as soon as its peer reads on.
    """

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._made = False

    def now(self) -> None:
        """Cancel the call."""
        self._made = True
        if self._task is not None:
            self._task.cancel()

    def explain(self, error: common_pb2.Error) -> None:
        """Raise RpcError with `error` if the call was cut."""
        if self._made:
            raise RpcError(error) from None


async def first_message(requests: AsyncIterator[M], expected: str, *, timeout_s: float) -> M:
    """The first message of a stream, which must have the payload `expected`.

    Raises:
        RpcError: INVALID_ARGUMENT if it has another one, TIMEOUT if none comes.
    """
    try:
        async with asyncio.timeout(timeout_s):
            message = await anext(requests, None)
    except TimeoutError:
        raise refuse(
            common_pb2.ERROR_CODE_TIMEOUT, f"No {expected} came within {timeout_s:g} seconds."
        ) from None
    if message is None or message.WhichOneof("payload") != expected:
        raise refuse(
            common_pb2.ERROR_CODE_INVALID_ARGUMENT, f"The first message of a stream must be the {expected}."
        )
    return message
