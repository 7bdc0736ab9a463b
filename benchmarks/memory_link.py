"""A link for a core that runs in the benchmark's own process."""

from __future__ import annotations

from typing import Any


class MemoryLink:
    """Stands in for the core's socket to its servicer."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def wake(self) -> None:
        """Do nothing: poll never waits."""

    def poll(self, timeout: float | None = 0.0) -> list[Any]:
        return []
