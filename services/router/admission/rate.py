"""How fast a lane empties, and what that makes of a queue: the time after which to come again."""

from __future__ import annotations

from collections import deque

WINDOW_S = 20.0
_SLOTS = 20


class DrainRate:
    """Units (sequences or tokens) per second that left a lane for engines, over the last WINDOW_S seconds."""

    def __init__(self) -> None:
        # Of each slot in which there was anything: its number and its units.
        self._slots: deque[list[int]] = deque()
        self._sum = 0
        self._began: float | None = None

    def watch(self, now: float) -> None:
        """Something waits: from here on, that nothing leaves says something too."""
        if self._began is None:
            self._began = now

    def rest(self) -> None:
        """Nothing waits any more: there is nothing to measure."""
        self._began = None
        self._slots.clear()
        self._sum = 0

    def add(self, now: float, units: int) -> None:
        """Units left."""
        slot = int(now / WINDOW_S * _SLOTS)
        if self._slots and self._slots[-1][0] == slot:
            self._slots[-1][1] += units
        else:
            self._slots.append([slot, units])
        self._sum += units
        self._trim(slot)

    def seconds(self, now: float, units: int) -> float | None:
        """How long `units` take to leave. None: it is not measured yet. Infinity: nothing leaves."""
        if self._began is None or now - self._began < WINDOW_S / _SLOTS:
            return None
        self._trim(int(now / WINDOW_S * _SLOTS))
        if not self._sum:
            return float("inf")
        return units * min(now - self._began, WINDOW_S) / self._sum

    def _trim(self, slot: int) -> None:
        while self._slots and self._slots[0][0] <= slot - _SLOTS:
            self._sum -= self._slots.popleft()[1]
