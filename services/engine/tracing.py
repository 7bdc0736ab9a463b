"""Spans and counters that show where the time of steps goes, and profiles of so many steps. Pure.

Times are microseconds of `time.perf_counter`, which is the system's monotonic clock.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import msgspec

Event = dict[str, Any]

# Of a part of a document, so that it passes any limit on messages.
_PART_BYTES = 256 * 1024
# Few enough events to stay near that.
_PART_EVENTS = 1024


def span_event(name: str, category: str, start_ns: int, end_ns: int, args: Mapping[str, Any]) -> Event:
    """Return a span of the calling thread."""
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        **_here(),
        "args": dict(args),
    }


def counter_event(name: str, at_ns: int, values: Mapping[str, int]) -> Event:
    """Return an event with values from this moment on, one curve each."""
    return {"name": name, "ph": "C", "ts": at_ns / 1000, **_here(), "args": dict(values)}


def name_event(kind: str, name: str) -> Event:
    """Return the event `process_name` or `thread_name` of the caller."""
    return {"name": kind, "ph": "M", "ts": 0, **_here(), "args": {"name": name}}


def thread_name_event() -> Event:
    """Return the calling thread's name."""
    return name_event("thread_name", threading.current_thread().name)


def _here() -> dict[str, int]:
    return {"pid": os.getpid(), "tid": threading.get_native_id()}


def trace_parts(events: Sequence[Event], facts: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield a trace document in parts of about 256 KiB: names, then all else in the order of its begin.

    `facts` are about the trace as a whole; viewers show them as its metadata.
    """
    ordered = sorted(events, key=lambda event: (event["ph"] != "M", event["ts"]))
    head = b'{"displayTimeUnit":"ms","otherData":' + msgspec.json.encode(dict(facts)) + b',"traceEvents":['
    pending = bytearray(head)
    for start in range(0, len(ordered), _PART_EVENTS):
        # Without the brackets.
        pending += (b"," if start else b"") + msgspec.json.encode(ordered[start : start + _PART_EVENTS])[1:-1]
        while len(pending) > _PART_BYTES:
            yield bytes(pending[:_PART_BYTES])
            del pending[:_PART_BYTES]
    yield bytes(pending + b"]}\n")


_PROCESS = "engine-core"


class EventSink(ABC):
    """Takes events from any thread, and names each thread once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: set[int] = set()

    def add(self, event: Event) -> None:
        """Take an event of the calling thread."""
        with self._lock:
            if event["tid"] not in self._threads:
                self._threads.add(event["tid"])
                self._keep(thread_name_event())
            self._keep(event)

    @abstractmethod
    def close(self) -> None:
        """Take no more."""

    @abstractmethod
    def _keep(self, event: Event) -> None:
        """Keep one event; the lock is held."""


class EventFile(EventSink):
    """Writes each event as it comes; with `steps`, only those of these steps, after which it is complete.

    A file without its last bracket, left by a process that was killed, is still read.
    """

    def __init__(self, path: Path, steps: range | None = None) -> None:
        """Raise OSError if the file cannot be written."""
        super().__init__()
        self._steps = steps
        self._inside = steps is None
        # Open until then.
        self._file: TextIO | None = path.open("w", encoding="utf-8")
        self._file.write("[\n")

    def close(self) -> None:
        """Complete the file."""
        with self._lock:
            self._complete()

    def _complete(self) -> None:
        if self._file is not None:
            self._file.write(msgspec.json.encode(name_event("process_name", _PROCESS)).decode() + "\n]\n")
            self._file.close()
            self._file = None

    def _keep(self, event: Event) -> None:
        step = event["args"].get("step")
        if self._steps is not None and step is not None:
            # Events of no step are written between those of the steps in the file.
            self._inside = step in self._steps
            # Two steps are in flight at most.
            if step >= self._steps.stop + 2:
                self._complete()
        if self._file is not None and (self._inside or event["ph"] == "M"):
            self._file.write(msgspec.json.encode(event).decode() + ",\n")


class EventBuffer(EventSink):
    """Keeps up to `limit` events in memory and counts the ones that it drops."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self._closed = False
        self.events: list[Event] = [name_event("process_name", _PROCESS)]
        self.dropped = 0

    def close(self) -> None:
        """Take no more events; keep those so far."""
        with self._lock:
            self._closed = True

    def extend(self, events: list[Event]) -> None:
        """Take events that bring their own processes and threads."""
        with self._lock:
            for event in events:
                self._keep(event)

    def _keep(self, event: Event) -> None:
        if self._closed:
            return
        if len(self.events) >= self._limit:
            self.dropped += 1
        else:
            self.events.append(event)


_OFF: AbstractContextManager[None] = nullcontext()


class Span:
    """Times the enclosed code, in its thread.

    `args` are shown with it; they, the name and the category may be changed until it ends.
    """

    __slots__ = ("_outer", "_start", "_tracer", "args", "category", "name")

    def __init__(self, tracer: StepTracer, name: str, step: int | None, args: dict[str, Any]) -> None:
        self._tracer = tracer
        self.name = name
        self.category = "step"
        self.args = args if step is None else {"step": step, **args}

    def __enter__(self) -> Span:
        self._outer = self._tracer.enter(self)
        self._start = time.perf_counter_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end = time.perf_counter_ns()
        self._tracer.leave(self._outer)
        if kind is not None:
            self.args["error"] = kind.__name__
        self._tracer.put(span_event(self.name, self.category, self._start, end, self.args))

    def mark_compiled(self, how: str) -> None:
        """Show that something was compiled or captured inside: viewers give it another colour and filter."""
        self.name = f"{self.name} ({how})"
        self.category = "compile"


class StepTracer:
    """Passes spans and counters to its sinks; without any, it costs next to nothing.

    The spans of a step are plan, prepare, wait and commit in the loop's thread and, in the device's, step
    with forward, sample and copy in it, which hold one for each static shape that runs. Their `step` argument
    counts launched steps from 1; a span inside another has its step unless it says otherwise.
    """

    def __init__(self, *sinks: EventSink) -> None:
        self._sinks = sinks
        self._local = threading.local()

    @property
    def on(self) -> bool:
        """True if there is a sink."""
        return bool(self._sinks)

    def listen(self, sink: EventSink) -> None:
        """Pass events from now on to this sink as well."""
        self._sinks = (*self._sinks, sink)

    def leave_out(self, sink: EventSink) -> None:
        """Pass nothing more to this sink."""
        self._sinks = tuple(other for other in self._sinks if other is not sink)

    def span(
        self, name: str, step: int | None = None, **args: Any
    ) -> AbstractContextManager[Span | None, bool | None]:
        """Trace the enclosed code; the context is the span, or None without a sink."""
        return Span(self, name, step, args) if self._sinks else _OFF

    def counters(self, name: str, **values: int) -> None:
        """Note values as of now."""
        if self._sinks:
            self.put(counter_event(name, time.perf_counter_ns(), values))

    def close(self) -> None:
        """Complete all sinks."""
        for sink in self._sinks:
            sink.close()
        self._sinks = ()

    def enter(self, span: Span) -> int | None:
        """Begin a span in the calling thread. Return the step of the span around it."""
        outer: int | None = getattr(self._local, "step", None)
        if outer is not None:
            span.args.setdefault("step", outer)
        self._local.step = span.args.get("step")
        return outer

    def leave(self, outer: int | None) -> None:
        """End a span whose surrounding step was `outer`."""
        self._local.step = outer

    def put(self, event: dict[str, Any]) -> None:
        """Pass an event of the calling thread on."""
        for sink in self._sinks:
            sink.add(event)


DeviceProfile = Callable[[], AbstractContextManager[list[Event]]]
"""Profiler of a device: a context with a list that is filled at its end."""


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
        """Raise the errors of the device's profiler."""
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
        """Note that a step has ended."""
        if step > self._launched and self.steps < self._wanted:
            self.steps += 1
            self._last = step

    @property
    def over(self) -> bool:
        """True if all steps have ended or the time is over."""
        return self.steps >= self._wanted or self.remaining <= 0

    @property
    def remaining(self) -> float:
        """Seconds until the recording ends in any case."""
        return max(0.0, self._deadline - time.monotonic())

    @property
    def dropped(self) -> int:
        """Number of events that were dropped for want of room."""
        return self._buffer.dropped

    @property
    def seconds(self) -> float:
        """Seconds since the recording began."""
        return time.monotonic() - self._begun

    def finish(self) -> list[Event]:
        """End the recording and return its events. Raises the errors of the device's profiler."""
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
