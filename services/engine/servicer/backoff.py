"""Waiting longer after each failure, and not in step with others."""

from __future__ import annotations

import random


class Backoff:
    """Delays that double from `initial_s` to `maximum_s`, each drawn between half of it and all of it."""

    def __init__(self, initial_s: float, maximum_s: float, *, rng: random.Random | None = None) -> None:
        self._initial = initial_s
        self._maximum = maximum_s
        self._current = initial_s
        self._rng = rng or random.Random()

    def next_delay(self) -> float:
        """Seconds to wait before the next attempt."""
        delay, self._current = self._current, min(self._current * 2, self._maximum)
        return delay * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        """The attempt worked: start from the initial delay again."""
        self._current = self._initial
