"""Load shedding that a router has announced: refuse here, before a prompt is rendered."""

from __future__ import annotations

from collections.abc import Callable

from catenary.v1 import common_pb2, router_pb2

# More than any router of ours tells.
MAX_ENTRIES = 1024
_TEXT = "The server is full for requests of this kind. Try again later."

Key = tuple[str, int, str | None]


class Shed:
    """One router's last word. Each entry holds for its retry time at the most. `clock` in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: dict[Key, tuple[common_pb2.ErrorCode.ValueType, float]] = {}

    def update(self, state: router_pb2.ShedState) -> None:
        """It replaces what was said before."""
        now = self._clock()
        self._entries = {
            (entry.model, entry.priority_class, entry.tenant if entry.HasField("tenant") else None): (
                entry.code,
                now + entry.retry_after_ms / 1000,
            )
            for entry in state.entries[:MAX_ENTRIES]
        }

    def clear(self) -> None:
        """Nothing is known of it any more."""
        self._entries = {}

    def refusal(
        self, model: str, priority_class: common_pb2.PriorityClass.ValueType, tenant: str
    ) -> common_pb2.Error | None:
        """Why such a sequence would be refused; None: it would not, as far as is known."""
        if not self._entries:
            return None
        now = self._clock()
        wanted = priority_class or common_pb2.PRIORITY_CLASS_DEFAULT
        for whose in (tenant, None):
            found = self._entries.get((model, wanted, whose))
            if found is not None and found[1] > now:
                return common_pb2.Error(
                    code=found[0],
                    message=_TEXT,
                    retryable=True,
                    retry_after_ms=max(1, round((found[1] - now) * 1000)),
                )
        return None
