"""Spans by OpenTelemetry's SDK. Imported only where they are wanted: the extra `otel` brings the SDK."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from catenary.telemetry.context import new_id
from catenary.telemetry.logs import get_logger
from catenary.telemetry.tracing import Attributes

_log = get_logger(__name__)

# Where packages with exporters enter them, by OpenTelemetry's conventions.
_EXPORTERS = "opentelemetry_traces_exporter"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class OtelSpan:
    """A span of OpenTelemetry."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def end(self, attributes: Attributes, *, name: str | None = None, error: str | None = None) -> None:
        """See Span."""
        span = self._span
        if name is not None:
            span.update_name(name)
        span.set_attributes(attributes)
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(trace.StatusCode.ERROR)
        span.end()


class OtelTracer:
    """See Tracer. The sampler is the provider's; by default it does what the parent's flag says."""

    def __init__(self, provider: trace.TracerProvider) -> None:
        self._tracer = provider.get_tracer("catenary")
        self._propagator = TraceContextTextMapPropagator()

    def start(self, name: str, parent: str | None, *, server: bool, lasted_s: float) -> OtelSpan:
        """See Tracer."""
        carrier = {} if parent is None else {"traceparent": parent}
        span = self._tracer.start_span(
            name,
            context=self._propagator.extract(carrier, context=Context()),
            kind=trace.SpanKind.SERVER if server else trace.SpanKind.INTERNAL,
            start_time=time.time_ns() - round(lasted_s * 1e9),
        )
        return OtelSpan(span)


def exporting_tracer(service: str, environment: Mapping[str, str]) -> OtelTracer | None:
    """Return a tracer with exporters, sampler, resource, limits and batches as the OTEL_* variables say; None
    without an exporter.

    Errors of an exporter are passed on. Spans are sent by a thread; those beyond its queue are dropped. The
    rest is sent at the exit.
    """
    attributes = {"service.instance.id": new_id("")}
    if not environment.get("OTEL_SERVICE_NAME"):
        attributes["service.name"] = service
    processors = [BatchSpanProcessor(exporter) for exporter in _exporters(environment)]
    if not processors:
        return None
    provider = TracerProvider(resource=Resource.create(attributes))
    for processor in processors:
        provider.add_span_processor(processor)
    return OtelTracer(provider)


def _exporters(environment: Mapping[str, str]) -> Iterator[SpanExporter]:
    for name in (environment.get("OTEL_TRACES_EXPORTER") or "otlp").split(","):
        wanted = _entry_name(name.strip(), environment)
        found = list(entry_points(group=_EXPORTERS, name=wanted))
        if not found:
            _log.warning("no spans are exported: there is no such exporter", exporter=wanted)
            continue
        _log.info("spans are exported", exporter=wanted)
        yield found[0].load()()


def _entry_name(name: str, environment: Mapping[str, str]) -> str:
    """Return the entry point of an exporter: `otlp` stands for one for each protocol."""
    if name != "otlp":
        return name
    protocol = next((set_to for each in _PROTOCOLS if (set_to := environment.get(each))), "http/protobuf")
    return "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
