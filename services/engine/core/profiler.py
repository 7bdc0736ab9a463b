"""Takes profiles of the core it lives in when the servicer asks for one."""

from __future__ import annotations

from collections.abc import Iterable

from catenary.telemetry import get_logger
from services.engine.link import CancelProfile, ProfileEnd, ProfilePart, StartProfile
from services.engine.tracing import DeviceProfile, StepRecording, StepTracer, trace_parts

log = get_logger(__name__)


class Profiler:
    """One profile at a time: a new one takes the place of the old."""

    def __init__(self, tracer: StepTracer, *, max_events: int, device: DeviceProfile) -> None:
        self._tracer = tracer
        self._max_events = max_events
        self._device = device
        self._id = 0
        self._recording: StepRecording | None = None
        self._failure: str | None = None

    def start(self, message: StartProfile, launched: int) -> None:
        """Begins a profile of the steps after the `launched`-th. What goes wrong is told by its end."""
        self._drop()
        self._id, self._failure = message.id, None
        try:
            self._recording = StepRecording(
                self._tracer,
                steps=message.steps,
                seconds=message.seconds,
                max_events=self._max_events,
                launched=launched,
                device=self._device if message.device_activities else None,
            )
        except Exception as error:
            self._failure = self._reason(error)

    def cancel(self, message: CancelProfile) -> None:
        """Ends this profile, if it is the one that runs, without a result."""
        if message.id == self._id:
            self._drop()

    def ended(self, step: int) -> None:
        """Notes that a step has ended."""
        if self._recording is not None:
            self._recording.ended(step)

    @property
    def remaining(self) -> float | None:
        """Seconds until there is something to send in any case; None if there is no profile."""
        return None if self._recording is None else self._recording.remaining

    def due(self) -> Iterable[ProfilePart | ProfileEnd]:
        """What is to be sent now: nothing, or all of a profile that is over."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            yield ProfileEnd(self._id, error=failure)
        recording = self._recording
        if recording is None or not recording.over:
            return
        self._recording = None
        seconds = recording.seconds
        try:
            events = recording.finish()
        except Exception as error:
            yield ProfileEnd(self._id, error=self._reason(error))
            return
        facts = {"steps": recording.steps, "seconds": seconds, "dropped_events": recording.dropped}
        for data in trace_parts(events, facts):
            yield ProfilePart(self._id, data)
        yield ProfileEnd(self._id, recording.steps, recording.dropped)

    def _drop(self) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            try:
                recording.finish()
            except Exception:
                log.warning("the device's profiler failed", exc_info=True)

    def _reason(self, error: Exception) -> str:
        log.warning("the device's profiler failed", exc_info=True)
        return f"The device's profiler failed: {type(error).__name__}."
