"""Waiting longer after each failure, and not in step with others."""

from __future__ import annotations

import random


class Backoff:
    """Delays that double from `initial_s` to `maximum_s`.

    Each is drawn between `1 - jitter` of it and all of it, so that peers which failed together do not retry
    together; jitter 0 is for a single peer.
    """

    def __init__(
        self, initial_s: float, maximum_s: float, *, jitter: float = 0.5, rng: random.Random | None = None
    ) -> None:
        self._initial = initial_s
        self._maximum = maximum_s
        self._current = initial_s
        self._jitter = jitter
        self._rng = rng or random.Random()

    def next_delay(self) -> float:
        """Return the seconds to wait before the next attempt."""
        delay, self._current = self._current, min(self._current * 2, self._maximum)
        return delay * self._rng.uniform(1 - self._jitter, 1.0)

    def reset(self) -> None:
        """Start from the initial delay again, after an attempt that worked."""
        self._current = self._initial
