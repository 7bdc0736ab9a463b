"""Warm-up beside serving: one shape at a time, between steps."""

from __future__ import annotations

import time
from collections.abc import Callable

from catenary.telemetry import get_logger
from services.engine.graphs.warmup import WarmUp

log = get_logger(__name__)


class BackgroundWarmUp:
    """Paces a warm-up. An idle engine captures at once; a busy one serves, after each capture, for at least
    as long as that took, so that warm-up gets no more than half of the time. `clock` gives steady seconds.
    """

    def __init__(self, warm_up: WarmUp, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._warm_up = warm_up
        self._clock = clock
        self._not_before = 0.0
        self.pending = warm_up.pending

    @property
    def done(self) -> int:
        """Shapes visited."""
        return self._warm_up.done if self.pending else self._warm_up.total

    @property
    def total(self) -> int:
        """Shapes to visit."""
        return self._warm_up.total

    def turn(self, *, busy: bool) -> bool:
        """Captures one shape if it is time for one; True if it did. A defect ends the warm-up alone."""
        now = self._clock()
        if not self.pending or (busy and now < self._not_before):
            return False
        try:
            self.pending = self._warm_up.step()
        except Exception:
            log.exception("the warm-up ends early: what is not captured runs eagerly")
            self.pending = False
        ended = self._clock()
        self._not_before = 2 * ended - now
        return True
