"""Collects spans and counters of an engine's steps for whoever listens."""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

from services.engine.tracing.events import counter_event, span_event
from services.engine.tracing.sinks import EventSink

_OFF: AbstractContextManager[None] = nullcontext()


class Span:
    """Times what is done inside, in the thread that does it.

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
        """Shows that something was compiled or captured inside: viewers give it another colour and filter."""
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
        """True if anybody listens."""
        return bool(self._sinks)

    def listen(self, sink: EventSink) -> None:
        """Passes what comes from now on to this sink as well."""
        self._sinks = (*self._sinks, sink)

    def leave_out(self, sink: EventSink) -> None:
        """Passes nothing more to this sink."""
        self._sinks = tuple(other for other in self._sinks if other is not sink)

    def span(
        self, name: str, step: int | None = None, **args: Any
    ) -> AbstractContextManager[Span | None, bool | None]:
        """Traces what is done inside; gives the span, or None if nobody listens."""
        return Span(self, name, step, args) if self._sinks else _OFF

    def counters(self, name: str, **values: int) -> None:
        """Notes values as of now."""
        if self._sinks:
            self.put(counter_event(name, time.perf_counter_ns(), values))

    def close(self) -> None:
        """Completes all sinks."""
        for sink in self._sinks:
            sink.close()
        self._sinks = ()

    def enter(self, span: Span) -> int | None:
        """Begins a span in the calling thread. Returns the step of the one around it."""
        outer: int | None = getattr(self._local, "step", None)
        if outer is not None:
            span.args.setdefault("step", outer)
        self._local.step = span.args.get("step")
        return outer

    def leave(self, outer: int | None) -> None:
        """Ends a span whose surrounding step was `outer`."""
        self._local.step = outer

    def put(self, event: dict[str, Any]) -> None:
        """Passes an event of the calling thread on."""
        for sink in self._sinks:
            sink.add(event)
