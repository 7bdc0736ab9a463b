"""Events of an attached engine's prefix cache on their way into the index, and the requests to the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from catenary.v1 import common_pb2, engine_pb2
from services.router.admission import Refused
from services.router.fleet import Engine
from services.router.index import KvFeed, KvIndex, MalformedKv

# Of one message: what is more goes into the next.
MAX_CHANGES = 1024
# Names of one message and what is around them.
MAX_BYTES = (1 << 20) + (1 << 16)


class KvPublication:
    """One PublishKv stream. Nothing here waits for the engine; the stream's writer drains `messages`.

    The index has of the engine what this stream told, and nothing once it is closed.
    """

    def __init__(self, engine: Engine, index: KvIndex[Engine], *, max_resyncs: int) -> None:
        self.engine = engine
        self.error: common_pb2.Error | None = None
        self.resyncs = 0
        self._index = index
        self._feed = KvFeed(index, engine)
        self._max_resyncs = max_resyncs
        self._resync: int | None = None
        self._closed = False
        self._wake = asyncio.Event()

    @property
    def closed(self) -> bool:
        """Nothing will be taken or handed out any more."""
        return self._closed

    def receive(self, request: engine_pb2.PublishKvRequest) -> None:
        """Handle a message after the hello.

        Raises:
            Refused: it breaks the contract, names more blocks than the engine has, or was one gap too many.
        """
        if self._closed:
            return
        changes = len(request.changes.changes)
        if changes > MAX_CHANGES or request.ByteSize() > MAX_BYTES:
            raise _refusal(f"A message has at most {MAX_CHANGES} changes and {MAX_BYTES} bytes.")
        try:
            gap = self._take(request)
        except MalformedKv as fault:
            raise _refusal(f"The message is malformed: {fault}.") from None
        total = self.engine.capacity.total_blocks
        if self._index.blocks(self.engine) > total:
            raise _refusal(f"The engine names more blocks than the {total} that it has.")
        if gap:
            self._ask()

    def close(self, error: common_pb2.Error | None = None) -> None:
        """End the stream; with `error`, as a refusal. The first close decides."""
        if self._closed:
            return
        self._closed = True
        self.error = error
        self._feed.close()
        self._wake.set()

    async def messages(self) -> AsyncIterator[engine_pb2.PublishKvResponse]:
        """The messages to write, until the publication is closed."""
        while not self._closed:
            self._wake.clear()
            if self._resync is not None:
                resync, self._resync = engine_pb2.KvResync(last_number=self._resync), None
                yield engine_pb2.PublishKvResponse(resync=resync)
            if not self._wake.is_set():
                await self._wake.wait()

    def _take(self, request: engine_pb2.PublishKvRequest) -> bool:
        match request.WhichOneof("payload"):
            case "snapshot":
                return self._feed.snapshot(request.snapshot)
            case "changes":
                return self._feed.changes(request.changes)
            case _:
                raise MalformedKv("only the first message of a stream is a hello")

    def _ask(self) -> None:
        self.resyncs += 1
        if self.resyncs > self._max_resyncs:
            raise _refusal(f"There were more than {self._max_resyncs} gaps (max-kv-resyncs).")
        self._resync = self._feed.last_number
        self._wake.set()


def _refusal(message: str) -> Refused:
    return Refused(common_pb2.ERROR_CODE_INVALID_ARGUMENT, message)
