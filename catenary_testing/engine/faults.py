"""The switch board of a scripted engine's faults: set by its script, or by a test while it runs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from catenary.v1 import common_pb2
from catenary_testing.engine.script import ScriptedFaults

_OVERLOADED = common_pb2.Error(
    code=common_pb2.ERROR_CODE_OVERLOADED,
    message="The scripted engine was told to refuse this sequence.",
    retryable=True,
    retry_after_ms=100,
)


@dataclass(slots=True)
class Faults:
    """Faults of one scripted engine. It outlives the engine's cores, so a fault spans a restart.

    Set the fields at any time from the engine's event loop.
    """

    stall_after_tokens: int | None = None
    crash_after_tokens: int | None = None
    exit_after_tokens: int | None = None
    drop_stream_after_tokens: int | None = None
    fail_restarts: int = 0
    fail_transfers: int = 0
    refusals: deque[common_pb2.Error] = field(default_factory=deque)
    # Called to close the Attach streams; the app connects it to its links.
    drop_streams: Callable[[], None] = lambda: None
    # Extra duration of every step, in seconds.
    step_delay_s: float = 0.0
    stalled: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    crash_reason: str | None = None

    @classmethod
    def from_script(cls, script: ScriptedFaults) -> Faults:
        """Return the faults that a script asks for from the start on."""
        return cls(
            stall_after_tokens=script.stall_after_tokens,
            crash_after_tokens=script.crash_after_tokens,
            exit_after_tokens=script.exit_after_tokens,
            drop_stream_after_tokens=script.drop_stream_after_tokens,
            fail_restarts=script.fail_restarts,
            fail_transfers=script.fail_transfers,
            refusals=deque([_OVERLOADED] * script.refuse_first),
        )

    def stall(self) -> None:
        """Make no step from now on."""
        self.stalled = True

    def holding(self) -> bool:
        """Return whether no step may be made now."""
        return self.stalled or self.crash_reason is not None

    def resume(self) -> None:
        """End a stall, whether it was called for or came by `stall_after_tokens`."""
        self.stalled = False
        self.stall_after_tokens = None
        self.changed.set()

    def crash(self, reason: str = "the scripted core was told to crash") -> None:
        """Kill the core now. The servicer starts another."""
        self.crash_reason = reason
        self.changed.set()

    def refuse_next(self, error: common_pb2.Error | None = None, *, times: int = 1) -> None:
        """Refuse the next `times` submits with `error` (default: OVERLOADED, retryable)."""
        self.refusals.extend([error or _OVERLOADED] * times)

    def on_generated(self, tokens: int) -> str | None:
        """Note that a sequence has generated `tokens`; the name of the one fault that this sets off, if any.

        Each fault goes off once.
        """
        if self.drop_stream_after_tokens is not None and tokens >= self.drop_stream_after_tokens:
            self.drop_stream_after_tokens = None
            return "drop"
        if self.exit_after_tokens is not None and tokens >= self.exit_after_tokens:
            return "exit"
        if self.crash_after_tokens is not None and tokens >= self.crash_after_tokens:
            self.crash_after_tokens = None
            return "crash"
        if self.stall_after_tokens is not None and tokens >= self.stall_after_tokens:
            self.stall_after_tokens = None
            return "stall"
        return None
