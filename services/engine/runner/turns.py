"""When the host may look at a step: not before the device computes the next one.

Threads of Python run one at a time. What a loop does with a step's result would keep the device's own
thread, where there is one, from beginning the next forward, which waits for nothing else; during a forward
nobody waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class StepTurns:
    """Steps by number, from 1. All but `wait` is quick, and called from the loop's or the device's thread."""

    def __init__(self) -> None:
        self._given = 0
        self._open: dict[int, threading.Event] = {}
        self.forward_begins: Callable[[], None] = lambda: None
        """To be called as the device is about to compute a forward."""

    def given(self, step: int) -> None:
        """The device is about to be given a step."""
        self._open[step] = threading.Event()
        self._given = step

    def begins(self, step: int) -> None:
        """The device has come to a step: with its first forward the one before may be looked at."""
        self.forward_begins = lambda: self._let(step - 1)

    def computed(self, step: int) -> None:
        """The device is done with a step's forwards. One that is replayed from a graph has told of none."""
        self._let(step - 1)

    def ended(self, step: int) -> None:
        """The device is done with a step, or will never compute it."""
        self._let(step - 1)
        if self._given == step:
            self._let(step)

    def wait(self, step: int) -> None:
        """Wait until a step that was given may be looked at."""
        if (event := self._open.get(step)) is not None:
            event.wait()
            del self._open[step]

    def _let(self, step: int) -> None:
        if (event := self._open.get(step)) is not None:
            event.set()
