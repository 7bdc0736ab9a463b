"""Which of many tickets are due, without looking at all of them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

H = TypeVar("H", bound=Hashable)

TICK_S = 0.05


class Deadlines(Generic[H]):
    """Things by the tick of their deadline. To add and to discard one is constant in time; `due` looks at the
    ticks in which anything is due some time."""

    def __init__(self) -> None:
        self._ticks: dict[int, dict[H, None]] = {}

    def add(self, thing: H, deadline: float) -> None:
        """It is due at `deadline`, in monotonic seconds, or up to a tick later."""
        self._ticks.setdefault(_tick(deadline), {})[thing] = None

    def discard(self, thing: H, deadline: float) -> None:
        """It is not due any more. `deadline` is the one that it was added with."""
        tick = _tick(deadline)
        things = self._ticks.get(tick)
        if things is None:
            return
        things.pop(thing, None)
        if not things:
            del self._ticks[tick]

    def due(self, now: float) -> list[H]:
        """The due ones, in order; each stays until it is discarded."""
        last = now / TICK_S
        return [
            thing
            for tick in sorted(tick for tick in self._ticks if tick <= last)
            for thing in self._ticks[tick]
        ]


def _tick(deadline: float) -> int:
    """The first tick that is not before the deadline."""
    return -int(-deadline // TICK_S)
