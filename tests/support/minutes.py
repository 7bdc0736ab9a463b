"""Time for tests of limits per minute: those of the clock, at whose turn counts begin anew."""

from __future__ import annotations

import time

import pytest

_NOW = 1_800_000_010.0


def stop_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unix time stands still, ten seconds after the turn of a minute; steady clocks run on."""
    monkeypatch.setattr(time, "time", lambda: _NOW)
