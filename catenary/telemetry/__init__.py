"""Logs, request and trace context, metrics exposition."""

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
from catenary.telemetry.exposition import MetricsServer
from catenary.telemetry.logs import configure_logging, get_logger, log_as_the_program_does

__all__ = [
    "MetricsServer",
    "bind_request",
    "child_traceparent",
    "configure_logging",
    "current_trace_id",
    "current_traceparent",
    "get_logger",
    "is_request_id",
    "log_as_the_program_does",
    "new_id",
    "request_id",
]
