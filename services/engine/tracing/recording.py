"""A profile: the events of so many steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from services.engine.tracing.events import Event
from services.engine.tracing.sinks import EventBuffer
from services.engine.tracing.tracer import StepTracer

DeviceProfile = Callable[[], AbstractContextManager[list[Event]]]
"""A device's own profiler: gives a list that it fills when it ends."""


class StepRecording:
    """Records from now until `steps` that were launched after this have ended, or `seconds` are over.

    `launched` is the number of the last step that was launched before.
    """

    def __init__(
        self,
        tracer: StepTracer,
        *,
        steps: int,
        seconds: float,
        max_events: int,
        launched: int,
        device: DeviceProfile | None,
    ) -> None:
        """Raises what the device's profiler raises."""
        self._tracer = tracer
        self._wanted = steps
        self._launched = launched
        self._begun = time.monotonic()
        self._deadline = self._begun + seconds
        self._buffer = EventBuffer(max_events)
        self._activities = None if device is None else device()
        self._device_events = [] if self._activities is None else self._activities.__enter__()
        self.steps = 0
        self._last = launched
        tracer.listen(self._buffer)

    def ended(self, step: int) -> None:
        """Notes that a step has ended."""
        if step > self._launched and self.steps < self._wanted:
            self.steps += 1
            self._last = step

    @property
    def over(self) -> bool:
        """True if there is nothing more to wait for."""
        return self.steps >= self._wanted or self.remaining <= 0

    @property
    def remaining(self) -> float:
        """Seconds until it ends in any case."""
        return max(0.0, self._deadline - time.monotonic())

    @property
    def dropped(self) -> int:
        """Events that there was no room for."""
        return self._buffer.dropped

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._begun

    def finish(self) -> list[Event]:
        """Ends it and returns its events. Raises what the device's profiler raises."""
        self._tracer.leave_out(self._buffer)
        try:
            if self._activities is not None:
                self._activities.__exit__(None, None, None)
        finally:
            self._buffer.extend(self._device_events)
            self._buffer.close()
        if self.steps < self._wanted:
            return self._buffer.events
        # The next step may have begun: half of one would be taken for a whole.
        return [event for event in self._buffer.events if self._wants(event)]

    def _wants(self, event: Event) -> bool:
        step = event.get("args", {}).get("step")
        return step is None or self._launched < step <= self._last
