"""How many calls a server runs, against how many it may."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from catenary.rpc.errors import refuse
from catenary.v1 import common_pb2


class CallCount:
    """Calls under way, and what streams carry that stands for calls. Of one loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._idle = asyncio.Event()
        self._idle.set()
        self.in_flight = 0
        """Those that have entered and not left."""

    def check(self) -> None:
        """Raises RpcError if there are as many as there may be."""
        if self.in_flight >= self._most:
            raise refuse(
                common_pb2.ERROR_CODE_OVERLOADED,
                f"The service already runs as many calls as it may ({self._most}, max_calls).",
                retryable=True,
                retry_after_ms=1000,
            )

    def enter(self) -> None:
        """One more, whatever the limit says."""
        self.in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        """One that has entered is over."""
        self.in_flight -= 1
        if not self.in_flight:
            self._idle.set()

    @contextmanager
    def one(self) -> Iterator[None]:
        """The block is one."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    async def wait_idle(self) -> None:
        """Wait until there are none."""
        await self._idle.wait()
