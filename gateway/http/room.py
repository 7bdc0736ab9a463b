"""Room for one more connection: below a limit of their number, and of the process's file descriptors."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

from catenary.telemetry import get_logger
from gateway.errors import ApiError, unavailable

_log = get_logger(__name__)
_TELL_AGAIN_S = 60.0
# Connections beyond --max-connections that are told so at a time, each for a second; more are cut off. No
# option: their descriptors come out of the reserve below, which has room for these.
MAX_TURNED_AWAY = 64


def _descriptor_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Room:
    """Says which new connections are refused: some descriptors stay free for files and for other services."""

    def __init__(self, max_connections: int, descriptor_limit: Callable[[], int] = _descriptor_limit) -> None:
        """Make one for a server.

        Args:
            max_connections: most connections at a time.
            descriptor_limit: the process's limit of open file descriptors; negative: there is none.
        """
        self._max_connections = max_connections
        limit = descriptor_limit()
        self._descriptors = limit if limit >= 0 else 1 << 62
        # The kernel gives the lowest free number: that of a new connection tells how many are open.
        self._reserve = max(8, min(64, limit // 8))
        self._told: float | None = None
        self.turned_away = 0
        """Connections that are open only to be told that they are refused."""

    def refusal(self, connections: int, descriptor: int) -> ApiError | None:
        """Why a new connection is refused, by the number of connections with it and its descriptor; None if
        it is not."""
        if descriptor >= self._descriptors - self._reserve:
            self._tell("descriptors", self._descriptors)
            return unavailable(
                f"The server is at its limit of {self._descriptors} open file descriptors.",
                code="too_many_connections",
            )
        if connections - self.turned_away > self._max_connections:
            self._tell("connections", self._max_connections)
            return unavailable(
                f"The server is at its limit of {self._max_connections} connections.",
                code="too_many_connections",
            )
        return None

    def can_tell(self, descriptor: int) -> bool:
        """Whether one more connection may stay open for a moment to be told that it is refused."""
        near = descriptor >= self._descriptors - self._reserve // 2
        return self.turned_away < MAX_TURNED_AWAY and not near

    def _tell(self, of: str, limit: int) -> None:
        now = time.monotonic()
        if self._told is None or now - self._told >= _TELL_AGAIN_S:
            self._told = now
            _log.warning("new connections are refused at the limit", of=of, limit=limit)
