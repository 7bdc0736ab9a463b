"""Spans: nothing without a tracer, OpenTelemetry's with one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from catenary.telemetry import (
    bind_request,
    configure_tracing,
    current_traceparent,
    record_span,
    span_here,
    start_span,
    tracing,
    unrecorded,
)
from catenary.telemetry.exporting import wants_tracing
from tests.support.spans import Spans, spans_here

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


@pytest.fixture
def spans() -> Iterator[Spans]:
    with spans_here() as seen:
        yield seen


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, False),
        ({"OTEL_SDK_DISABLED": "TRUE", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, False),
    ],
)
def test_spans_are_wanted_by_opentelemetrys_variables(environment: dict[str, str], wanted: bool) -> None:
    assert wants_tracing(environment) is wanted


def test_without_a_tracer_the_trace_goes_on_and_nobody_is_told() -> None:
    assert not tracing()
    assert start_span("a", PARENT).traceparent.startswith(f"00-{TRACE}-")
    assert record_span("a", PARENT, {}, lasted_s=1.0) == PARENT
    with bind_request("r", PARENT), span_here("a") as told:
        told["x"] = 1
        assert current_traceparent() == PARENT


def test_without_the_variables_nothing_of_opentelemetry_is_loaded() -> None:
    code = (
        "import sys; from catenary.telemetry import configure_tracing; configure_tracing('x'); "
        "import services.router.app, services.tokenizer.app, services.engine.servicer; "
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], env={"PATH": ""}, check=False).returncode == 0


@pytest.mark.parametrize(
    "variables",
    [
        {"OTEL_TRACES_EXPORTER": "nonsense"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
        {"OTEL_TRACES_EXPORTER": "console", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "-1"},
    ],
)
def test_variables_that_make_no_sense_keep_nobody_from_starting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    configure_tracing("x")
    assert not tracing()
    assert "no spans are exported" in capsys.readouterr().out


def test_a_span_is_a_child_of_its_parent_and_a_parent_of_others(spans: Spans) -> None:
    span = start_span("request", PARENT, server=True)
    with bind_request("r", span.traceparent), span_here("inner") as told:
        told["some.count"] = 2
        inner = current_traceparent()
        below = record_span("below", inner, {"list": [1, 2]}, lasted_s=0.5)
    span.end({"http.route": "/x"}, name="GET /x")
    below_it, inner_one, outer = spans.all()
    assert {one.trace for one in spans.all()} == {TRACE}
    assert (outer.name, outer.parent, outer.attributes) == ("GET /x", PARENT[36:52], {"http.route": "/x"})
    assert (inner_one.parent, inner_one.attributes) == (outer.id, {"some.count": 2})
    assert (below_it.parent, below_it.attributes["list"]) == (inner_one.id, (1, 2))
    assert below == f"00-{TRACE}-{below_it.id}-01"
    assert below_it.end - below_it.start >= 500_000_000


def test_an_error_marks_its_span(spans: Spans) -> None:
    with pytest.raises(ValueError, match="no"), span_here("work"):
        raise ValueError("no: secret text")
    (span,) = spans.all()
    assert span.failed
    assert span.attributes == {"error.type": "ValueError"}


def test_what_the_client_does_not_sample_is_not_exported(spans: Spans) -> None:
    span = start_span("request", PARENT[:-1] + "0")
    assert span.traceparent.startswith(f"00-{TRACE}-")
    assert span.traceparent.endswith("-00")
    span.end({})
    unrecorded(PARENT).end({})
    assert spans.all() == []


@pytest.mark.parametrize("parent", [None, "", "nonsense", "00-0-0-01"])
def test_without_a_valid_parent_a_trace_begins(spans: Spans, parent: str | None) -> None:
    record_span("first", parent, {}, lasted_s=0.0)
    (span,) = spans.all()
    assert span.parent == ""
