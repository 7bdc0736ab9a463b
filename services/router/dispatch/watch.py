"""Peers that do not read, noticed from outside: a stream that is stuck in a write cannot notice itself."""

from __future__ import annotations

import time
from collections.abc import Callable


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
