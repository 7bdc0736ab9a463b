"""A few threads for work that waits for other engines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from catenary.telemetry import get_logger
from catenary.transfer import TransferError

log = get_logger(__name__)

Work = Callable[[], None]

# What is at work then waits for another engine, and for that no process should.
_CLOSING_S = 1.0


class Fetchers:
    """Up to `count` threads, started as they are needed. They do not hold up the end of the process."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def run(self, work: Work) -> None:
        """Runs it when a thread is free. What it raises is logged."""
        self._queue.put(work)
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._work, name="kv fetch", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Lets each thread end after what it is at, and waits for that for a moment.

        A thread that wakes up while the interpreter ends is unwound by it, which C++ answers with an abort.
        """
        for _ in self._threads:
            self._queue.put(None)
        until = time.monotonic() + _CLOSING_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except TransferError as error:
                log.debug("an offer was not given back", fault=error.fault.value)
            except Exception:
                log.exception("a connector failed")
