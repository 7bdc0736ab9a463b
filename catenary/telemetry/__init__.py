"""Logs, request and trace context, spans."""

from __future__ import annotations

from catenary.telemetry.context import (
    bind_request,
    child_traceparent,
    current_trace_id,
    current_traceparent,
    is_request_id,
    new_id,
    request_id,
)
from catenary.telemetry.exporting import configure_tracing
from catenary.telemetry.logs import configure_logging, get_logger, log_as_the_program_does
from catenary.telemetry.tracing import (
    Span,
    SpanNotes,
    record_span,
    set_tracer,
    span_here,
    start_span,
    tracing,
    unrecorded,
)

__all__ = [
    "Span",
    "SpanNotes",
    "bind_request",
    "child_traceparent",
    "configure_logging",
    "configure_tracing",
    "current_trace_id",
    "current_traceparent",
    "get_logger",
    "is_request_id",
    "log_as_the_program_does",
    "new_id",
    "record_span",
    "request_id",
    "set_tracer",
    "span_here",
    "start_span",
    "tracing",
    "unrecorded",
]
