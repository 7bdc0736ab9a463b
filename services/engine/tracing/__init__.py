"""Where the time of steps goes: spans, counters, and profiles of so many steps. Pure."""

from __future__ import annotations

from services.engine.tracing.events import Event, trace_parts
from services.engine.tracing.profiler import Profiler
from services.engine.tracing.sinks import EventBuffer, EventFile
from services.engine.tracing.tracer import Span, StepTracer

__all__ = [
    "Event",
    "EventBuffer",
    "EventFile",
    "Profiler",
    "Span",
    "StepTracer",
    "trace_parts",
]
