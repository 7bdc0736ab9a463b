"""Time for tests of limits per minute: those of the clock, at whose turn counts begin anew."""

from __future__ import annotations

import time

import pytest

_NOW = 1_800_000_010.0


class StoppedClock:
    """Unix time that stands still, ten seconds after the turn of a minute, until the test moves it."""

    def __init__(self) -> None:
        self.now = _NOW

    def later(self, seconds: float) -> None:
        """Let so much time have passed."""
        self.now += seconds


def stop_the_clock(monkeypatch: pytest.MonkeyPatch) -> StoppedClock:
    """Stop Unix time; steady clocks run on."""
    clock = StoppedClock()
    monkeypatch.setattr(time, "time", lambda: clock.now)
    return clock
