"""Health by progress: an engine that has work and makes no step is not well, whatever its sockets say."""

from __future__ import annotations


class ProgressWatch:
    """Tells a stall from the times of steps. Times are seconds of any steady clock."""

    def __init__(self, stall_limit_s: float) -> None:
        self._limit = stall_limit_s
        self._since: float | None = None

    def on_work(self, now: float) -> None:
        """A sequence was handed to the core. An idle core's time counts from here."""
        if self._since is None:
            self._since = now

    def on_step(self, now: float, *, more: bool) -> None:
        """The core made a step; `more` tells whether it still has work."""
        self._since = now if more else None

    def reset(self) -> None:
        """The core is new or gone: it owes nothing."""
        self._since = None

    def stalled(self, now: float) -> bool:
        """Whether the core has had work without a step for longer than the limit."""
        return self._since is not None and now - self._since > self._limit
