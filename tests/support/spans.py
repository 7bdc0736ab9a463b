"""Spans that a test can look at: those of this process in memory, those of others by OTLP over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from catenary.telemetry import set_tracer
from catenary.telemetry.otel import OtelTracer


@dataclass(frozen=True, slots=True)
class SeenSpan:
    """One span; ids as hex digits, `parent` empty for the first of a trace, times in nanoseconds."""

    name: str
    trace: str
    id: str
    parent: str
    start: int
    end: int
    failed: bool
    attributes: dict[str, Any]


@dataclass(slots=True)
class Collector:
    """What a collector at `address` has got so far."""

    address: str
    spans: list[SeenSpan] = field(default_factory=list)
    services: set[str] = field(default_factory=set)

    def take(self, request: ExportTraceServiceRequest) -> None:
        """Keep the spans of one request."""
        for resource in request.resource_spans:
            about = {each.key: each.value.string_value for each in resource.resource.attributes}
            self.services.add(about["service.name"])
            self.spans += [
                SeenSpan(
                    name=span.name,
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    start=span.start_time_unix_nano,
                    end=span.end_time_unix_nano,
                    failed=span.status.code == span.status.STATUS_CODE_ERROR,
                    attributes={each.key: str(each.value) for each in span.attributes},
                )
                for scope in resource.scope_spans
                for span in scope.spans
            ]


class Spans:
    """Spans of this process."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    def all(self) -> list[SeenSpan]:
        """Those that are over, in the order of their ends."""
        return [_seen(span) for span in self._exporter.get_finished_spans()]

    def named(self, name: str) -> list[SeenSpan]:
        """Those of this name."""
        return [span for span in self.all() if span.name == name]


@contextmanager
def spans_here() -> Iterator[Spans]:
    """Spans of this process go to memory meanwhile."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    set_tracer(OtelTracer(provider))
    try:
        yield Spans(exporter)
    finally:
        set_tracer(None)


@contextmanager
def collector() -> Iterator[Collector]:
    """A collector that takes OTLP over HTTP, in threads."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            seen.take(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    seen = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _seen(span: Any) -> SeenSpan:
    parent = span.parent
    return SeenSpan(
        name=span.name,
        trace=f"{span.context.trace_id:032x}",
        id=f"{span.context.span_id:016x}",
        parent="" if parent is None else f"{parent.span_id:016x}",
        start=span.start_time,
        end=span.end_time,
        failed=not span.status.is_ok and not span.status.is_unset,
        attributes=dict(span.attributes),
    )
