"""An event loop in a thread of its own, for programs that have none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for callers that wait for them. Any number of threads may call."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        # A program that ends without closing it must not hang on it.
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether nothing can be run any more."""
        return self._loop.is_closed()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What comes of `work`. Ctrl-C cancels it. Raises what it raises, and RuntimeError once closed."""
        if self.closed:
            work.close()
            raise RuntimeError("it is closed already")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def close(self) -> None:
        """End the thread; what still runs is left as it is. Idempotent."""
        if self.closed:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
