"""Spans of a request. Without an exporter nothing is loaded and next to nothing done.

A trace is passed on as a W3C traceparent: in the metadata of calls, and in `SequenceSpec.traceparent`. Names
of attributes follow OpenTelemetry's conventions where there are any. They hold ids and counts, never prompts,
completions, keys or secrets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from catenary.telemetry.context import bind_traceparent, child_traceparent, current_traceparent

Value = str | int | float | Sequence[str] | Sequence[int] | Sequence[float]
Attributes = Mapping[str, Value]
# Attributes that the block of a span may add to.
SpanNotes = dict[str, Value]


class Span(Protocol):
    """A piece of work that has begun."""

    @property
    def traceparent(self) -> str:
        """The trace context for calls made within the span."""

    def end(self, attributes: Attributes, *, name: str | None = None, error: str | None = None) -> None:
        """End the span. `name`: one that is known only now; `error`: why it failed, in a word."""


class Tracer(Protocol):
    """Makes spans and has them exported."""

    def start(self, name: str, parent: str | None, *, server: bool, lasted_s: float) -> Span:
        """Return a span that began `lasted_s` seconds ago. `server`: it answers another process."""


_tracer: Tracer | None = None


def tracing() -> bool:
    """Return whether spans are exported: a caller that gathers attributes asks first."""
    return _tracer is not None


def set_tracer(tracer: Tracer | None) -> None:
    """Give all spans from here on to `tracer`."""
    global _tracer
    _tracer = tracer


def start_span(name: str, parent: str | None, *, server: bool = False) -> Span:
    """Begin a span below `parent`, a traceparent, or without a valid one a trace. The caller ends it."""
    if _tracer is None:
        return _Unrecorded(child_traceparent(parent))
    return _tracer.start(name, parent, server=server, lasted_s=0.0)


def unrecorded(parent: str | None) -> Span:
    """Return a span that is not exported, and still names the trace in logs and to other processes."""
    return _Unrecorded(child_traceparent(parent))


def record_span(
    name: str, parent: str | None, attributes: Attributes, *, lasted_s: float, error: str | None = None
) -> str | None:
    """Record a span that is over now. Return its traceparent; without `tracing`, `parent`."""
    if _tracer is None:
        return parent
    span = _tracer.start(name, parent, server=False, lasted_s=lasted_s)
    span.end(attributes, error=error)
    return span.traceparent


@contextmanager
def span_here(name: str) -> Iterator[SpanNotes]:
    """Run the block as a span of the request at hand, the parent of its calls; it may add attributes."""
    attributes: SpanNotes = {}
    if _tracer is None:
        yield attributes
        return
    span = _tracer.start(name, current_traceparent(), server=False, lasted_s=0.0)
    error: str | None = None
    try:
        with bind_traceparent(span.traceparent):
            yield attributes
    except BaseException as failure:
        error = type(failure).__name__
        raise
    finally:
        span.end(attributes, error=error)


class _Unrecorded:
    __slots__ = ("traceparent",)

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent

    def end(self, attributes: Attributes, *, name: str | None = None, error: str | None = None) -> None:
        """See Span."""
