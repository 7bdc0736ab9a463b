"""The one loop of a core: poll the link, handle its messages, step, report.

Generating and pooling are two kinds of work under it. The loop has one thread; it waits for the device, and
for the link while there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from catenary.telemetry import get_logger
from services.engine.core.errors import CoreFailure
from services.engine.core.outputs import KvEventDelta
from services.engine.link import (
    AbortSequences,
    BlockingLink,
    CancelProfile,
    CoreLoad,
    CoreReady,
    CoreStep,
    FollowKv,
    ProfileEnd,
    ProfilePart,
    StartProfile,
    StepColumns,
    StopCore,
    SubmitSequence,
    ToCore,
)
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
        """Begin a profile of the steps after the `launched`-th. Errors are reported with its end."""
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
        """End this profile, if it is the one that runs, without a result."""
        if message.id == self._id:
            self._drop()

    def ended(self, step: int) -> None:
        """Note that a step has ended."""
        if self._recording is not None:
            self._recording.ended(step)

    @property
    def remaining(self) -> float | None:
        """Seconds until there is something to send in any case; None if there is no profile."""
        return None if self._recording is None else self._recording.remaining

    def due(self) -> Iterable[ProfilePart | ProfileEnd]:
        """Yield a profile that is over, with its end; else nothing."""
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


class Work(Protocol):
    """Sequences or documents, computed step by step. Called from the loop's thread alone."""

    @property
    def busy(self) -> bool:
        """True while anything lives: running, waiting or being fetched."""

    @property
    def steppable(self) -> bool:
        """True if `step` has something to do now."""

    @property
    def patience(self) -> float | None:
        """Seconds until something falls due without a message; None: nothing does."""

    @property
    def steps(self) -> int:
        """Number of the last step that was launched."""

    @property
    def kv_event_delta(self) -> KvEventDelta | None:
        """Changes of the prefix cache to publish; None without one."""

    def submit(self, message: SubmitSequence) -> None:
        """Take in a sequence, or refuse it in the columns of the next step."""

    def abort(self, key: int) -> None:
        """End a sequence wherever it is; unknown keys are ignored."""

    def step(self) -> bool:
        """Launch the next step if there is one, end the one before. True if there is something to report."""

    def settle(self) -> None:
        """Do the work that may wait until a step's tokens are sent."""

    def warm_up(self) -> bool:
        """Visit one shape for an idle engine; False if none is left."""

    def load(self) -> CoreLoad:
        """Return the load now."""

    def take(self) -> StepColumns:
        """Return the columns since the last call and begin new ones."""


class Engine(Protocol):
    """A started core: model, device, and the kind of work that the model is for."""

    @property
    def ready(self) -> CoreReady:
        """Facts for the servicer."""

    @property
    def tracer(self) -> StepTracer:
        """Tracer of the steps."""

    @property
    def profiler(self) -> Profiler:
        """Profiler of the steps."""

    def work(self, wake: Callable[[], None], report: Callable[[], None]) -> Work:
        """Make a loop's work. `wake`, from any thread, ends the loop's poll; `report` reports at once."""

    def close(self) -> None:
        """Wait for the device and free everything that is held."""


class CoreLoop:
    """Runs one engine until the servicer stops it or goes away."""

    def __init__(self, link: BlockingLink, engine: Engine) -> None:
        self._link = link
        self._tracer = engine.tracer
        self._profiler = engine.profiler
        self.work = engine.work(link.wake, self.report)
        self._kv_event_delta = self.work.kv_event_delta
        self._stopping = False

    def run(self) -> None:
        """Return after StopCore. Raises LinkClosed at the link's end, CoreFailure, or a defect's error."""
        # Messages handled before the first poll may ask for a stop, or have something to report.
        self.report()
        while not self._stopping:
            self.advance()
            self.send_profile()
            for message in self._link.poll(self._patience()):
                self.handle(message)

    def handle(self, message: ToCore) -> None:
        """Handle one message. Sequences that end by it are reported with the next step."""
        match message:
            case SubmitSequence():
                self.work.submit(message)
            case AbortSequences(keys=keys):
                for key in keys:
                    self.work.abort(key)
            case FollowKv() if self._kv_event_delta is not None:
                self._kv_event_delta.follow()
            case StartProfile():
                self._profiler.start(message, self.work.steps)
            case CancelProfile():
                self._profiler.cancel(message)
            case StopCore():
                self._stopping = True
            case _:
                raise CoreFailure(f"the servicer sent {type(message).__name__} to a running core")

    def advance(self) -> None:
        """Step, and report if there is anything to report."""
        if self.work.step():
            self.report()
        if self._kv_event_delta is not None:
            # After the step's tokens, which a client waits for.
            for news in self._kv_event_delta.due():
                self._link.send(news)
        self.work.settle()

    def report(self) -> None:
        """Send the columns so far and the load."""
        load = self.work.load()
        self._tracer.counters("sequences", running=load.running, waiting=load.waiting)
        if self._kv_event_delta is not None:
            self._tracer.counters("KV blocks", used=load.used_blocks)
        self._link.send(CoreStep(columns=self.work.take(), load=load))

    def send_profile(self) -> None:
        """Send a profile that is over."""
        for message in self._profiler.due():
            self._link.send(message)

    def warm_up(self) -> bool:
        """Continue a warm-up during serving, for an idle engine. True if it visited a shape."""
        if not self.work.warm_up():
            return False
        self.report()
        return True

    def _patience(self) -> float | None:
        """Return the seconds to wait for a message; None: for ever."""
        if self.work.steppable or self.warm_up():
            return 0.0
        limits = (self._profiler.remaining, self.work.patience)
        return min((limit for limit in limits if limit is not None), default=None)
