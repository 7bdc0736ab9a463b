"""The common parts of the services' streams: their first message, their writes, and the watch over these."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol, TypeVar

from catenary.rpc import RpcError, refuse
from catenary.v1 import common_pb2, engine_pb2, router_pb2

M = TypeVar("M", router_pb2.SessionRequest, engine_pb2.AttachRequest, engine_pb2.PublishKvRequest)
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

INTERNAL = common_pb2.Error(
    code=common_pb2.ERROR_CODE_INTERNAL, message="The router failed because of an internal error."
)
SLOW_READER = common_pb2.Error(
    code=common_pb2.ERROR_CODE_SLOW_READER, message="The stream was not read for too long."
)


class WatchedStream:
    """The writes of one stream: `writing` before a message goes to gRPC, `written` when gRPC has taken it."""

    __slots__ = ("_clock", "_on_stall", "_since", "_strikes")

    def __init__(self, on_stall: Callable[[int], None], clock: Callable[[], float]) -> None:
        self._on_stall = on_stall
        self._clock = clock
        self._since: float | None = None
        self._strikes = 0

    def writing(self) -> None:
        """Start the time of a write."""
        self._since = self._clock()

    def written(self) -> None:
        """End the time of a write."""
        self._since = None
        self._strikes = 0

    def check(self, limit_s: float) -> None:
        """Call `on_stall(n)` when a write has lasted n limits, once for each n."""
        if self._since is not None and self._clock() - self._since > limit_s * (self._strikes + 1):
            self._strikes += 1
            self._on_stall(self._strikes)


class ReaderWatch:
    """Watch over streams of one kind: a stream that is stuck in a write cannot notice it itself.

    `limit_s`: seconds that a write may last. `clock`: monotonic, in seconds.
    """

    def __init__(self, limit_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._watched: set[WatchedStream] = set()

    def __len__(self) -> int:
        return len(self._watched)

    def add(self, on_stall: Callable[[int], None]) -> WatchedStream:
        """Watch a stream. `on_stall` gets 1, 2, ... as a stuck write passes that many limits."""
        watched = WatchedStream(on_stall, self._clock)
        self._watched.add(watched)
        return watched

    def remove(self, watched: WatchedStream) -> None:
        """Stop watching a stream. Idempotent."""
        self._watched.discard(watched)

    def sweep(self) -> None:
        """Check all streams."""
        for watched in list(self._watched):
            watched.check(self._limit_s)


class Cut:
    """Ends the handler that made it from outside, when it is stuck in a write.

    gRPC sends no status for a handler that was merely cancelled, and the peer would wait for ever. So the
    handler calls `explain` when it is closed, and the call ends with a status as soon as its peer reads on.
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


class AcceptedStream(Protocol[R_co]):
    """A bidirectional stream whose hello was accepted."""

    @property
    def error(self) -> common_pb2.Error | None:
        """The error with which the stream ends once `messages` has ended; None: well."""

    def welcome(self) -> R_co:
        """Return the first message to write."""

    def messages(self) -> AsyncIterator[R_co]:
        """Yield the other messages to write."""

    async def read(self) -> None:
        """Handle the peer's messages until it ends them."""

    def stalled(self) -> None:
        """End the stream: its peer does not read."""

    def close(self) -> None:
        """End the stream, for whatever reason. Idempotent."""


async def serve_stream(
    accept: Callable[[], Awaitable[AcceptedStream[R]]], watch: ReaderWatch
) -> AsyncIterator[R]:
    """Accept a stream, then read and write it to its end, its writes under `watch`.

    Raises:
        RpcError: raised by `accept`; the stream's `error`; SLOW_READER if the peer did not read.
    """
    stream = await accept()
    cut = Cut()

    def stalled(_strikes: int) -> None:
        stream.stalled()
        cut.now()

    watched = watch.add(stalled)
    reader = asyncio.create_task(stream.read())
    try:
        watched.writing()
        yield stream.welcome()
        watched.written()
        async for message in stream.messages():
            watched.writing()
            yield message
            watched.written()
        if stream.error is not None:
            raise RpcError(stream.error)
    except GeneratorExit:
        cut.explain(SLOW_READER)
        raise
    finally:
        reader.cancel()
        watch.remove(watched)
        stream.close()


async def first_message(requests: AsyncIterator[M], expected: str, *, timeout_s: float) -> M:
    """Return the first message of a stream, which must have the payload `expected`.

    Raises:
        RpcError: INVALID_ARGUMENT if it has another one, TIMEOUT if none comes in time.
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
