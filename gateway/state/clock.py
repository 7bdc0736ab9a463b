"""Leases in Unix time, which all processes that share a database read, and which may jump."""

from __future__ import annotations

from collections.abc import Callable

_STEP_S = 2.0
# No lease is so long: one that ends later was taken before the clock was set back.
_FAR_S = 3600.0


class LeaseClock:
    """Judges the leases of others.

    When the clock is set forward all of them have run out at once, though their holders live. So none counts
    as run out until there was time to renew it."""

    def __init__(self, lease_s: float, clock: Callable[[], float], elapsed: Callable[[], float]) -> None:
        """`lease_s`: of each lease; `clock`: Unix time; `elapsed`: seconds of a monotonic clock."""
        self._lease_s = lease_s
        self._clock = clock
        self._elapsed = elapsed
        self._ahead = clock() - elapsed()
        self._trusted_from = elapsed()

    def valid(self) -> tuple[float, float]:
        """The earliest and the latest end that the lease of a living process can have."""
        now, elapsed = self._clock(), self._elapsed()
        if abs(now - elapsed - self._ahead) > _STEP_S:
            self._trusted_from = elapsed + self._lease_s
        self._ahead = now - elapsed
        if elapsed < self._trusted_from:
            return float("-inf"), float("inf")
        return now, now + _FAR_S
