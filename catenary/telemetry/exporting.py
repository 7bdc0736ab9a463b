"""Export the spans of a process, if OpenTelemetry's variables ask for that."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module

from catenary.telemetry.logs import get_logger
from catenary.telemetry.tracing import set_tracer

_log = get_logger(__name__)

_DISABLED = "OTEL_SDK_DISABLED"
_EXPORTER = "OTEL_TRACES_EXPORTER"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def wants_tracing(environment: Mapping[str, str]) -> bool:
    """Whether the variables of OpenTelemetry ask for spans: an exporter is named, or an address for OTLP."""
    if environment.get(_DISABLED, "").strip().lower() == "true":
        return False
    if exporter := environment.get(_EXPORTER, "").strip():
        return exporter != "none"
    return any(environment.get(name) for name in _ENDPOINTS)


def configure_tracing(service: str) -> None:
    """Export the spans of this process, as `catenary-SERVICE`, if the environment asks for that.

    An error that prevents the export is logged and does not prevent the start.
    """
    if not wants_tracing(os.environ):
        return
    try:
        otel = import_module("catenary.telemetry.otel")
    except ModuleNotFoundError as missing:
        _log.warning("no spans are exported: install catenary[otel]", missing=missing.name)
        return
    try:
        set_tracer(otel.exporting_tracer(f"catenary-{service}", os.environ))
    except Exception:
        # An exporter is anybody's, and so are the values of its variables.
        _log.exception("no spans are exported")
