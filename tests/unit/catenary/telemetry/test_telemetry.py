from __future__ import annotations

import asyncio
import json
import logging
import re

import pytest
from prometheus_client import CollectorRegistry, Counter

from catenary.rpc import MetricsServer
from catenary.telemetry import (
    bind_request,
    child_traceparent,
    configure_logging,
    current_trace_id,
    current_traceparent,
    get_logger,
    is_request_id,
    new_id,
    request_id,
)

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"

pytestmark = pytest.mark.usefixtures("kept_logging")


def test_the_context_is_bound_for_the_block_only() -> None:
    assert request_id() is None
    with bind_request("r-1", PARENT):
        assert (request_id(), current_traceparent()) == ("r-1", PARENT)
        assert current_trace_id() == "0af7651916cd43dd8448eb211c80319c"
        with bind_request("r-2", None):
            assert (request_id(), current_trace_id()) == ("r-2", None)
        assert request_id() == "r-1"
    assert (request_id(), current_traceparent()) == (None, None)


def test_a_child_keeps_the_trace_and_the_flags() -> None:
    child = child_traceparent(PARENT)
    assert child.startswith("00-0af7651916cd43dd8448eb211c80319c-")
    assert child.endswith("-00")
    assert child != PARENT


@pytest.mark.parametrize(
    "parent",
    [
        None,
        "",
        "x",
        PARENT.upper(),
        PARENT + "-1",
        "ff" + PARENT[2:],
        PARENT.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32),
        PARENT.replace("b7ad6b7169203331", "0" * 16),
        PARENT + "\n",
    ],
)
def test_an_invalid_parent_starts_a_new_trace(parent: str | None) -> None:
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", child_traceparent(parent))
    assert "0af7651916cd43dd8448eb211c80319c" not in child_traceparent(parent)


@pytest.mark.parametrize(
    ("value", "fit"), [("a-1", True), ("", False), ("a b", False), ("a\n", False), ("x" * 129, False)]
)
def test_request_ids_of_callers_are_checked(value: str, fit: bool) -> None:
    assert is_request_id(value) is fit


def test_new_ids_have_the_prefix_and_no_dashes() -> None:
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", new_id("chatcmpl-"))


def test_json_lines_carry_the_context_and_no_local_variables(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(level="info", fmt="json", service="router")
    log = get_logger("a.b")
    prompt = "the prompt's text"
    with bind_request("r-1", PARENT):
        log.debug("hidden")
        try:
            raise ValueError("broken")
        except ValueError:
            log.exception("failed", engine="e1")
    assert prompt
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    event = json.loads(lines[0])
    assert event["event"] == "failed"
    assert event["service"] == "router"
    assert event["engine"] == "e1"
    assert event["request_id"] == "r-1"
    assert event["trace_id"] == "0af7651916cd43dd8448eb211c80319c"
    assert "broken" in lines[0]
    assert prompt not in lines[0]


def test_text_values_cannot_forge_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(level="info", fmt="text", service="router")
    get_logger("a").warning("odd", value="x\n2026 [error] forged")
    logging.getLogger("library").warning("plain %s", "text")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "service='router'" in lines[1]


@pytest.mark.parametrize(("level", "fmt"), [("loud", "text"), ("info", "xml")])
def test_a_bad_level_or_format_is_refused(level: str, fmt: str) -> None:
    with pytest.raises(ValueError, match="is not one of"):
        configure_logging(level=level, fmt=fmt, service="x")


async def _ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        async with asyncio.timeout(10):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_the_metrics_page() -> None:
    registry = CollectorRegistry()
    Counter("things", "Things.", registry=registry).inc(3)
    server = MetricsServer(registry)
    port = await server.start("127.0.0.1", 0)
    try:
        page = await _ask(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert page.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"things_total 3.0" in page
        assert b" 404 " in await _ask(port, b"GET / HTTP/1.1\r\n\r\n")
        assert b" 405 " in await _ask(port, b"POST /metrics HTTP/1.1\r\n\r\n")
        assert b" 405 " in await _ask(port, b"nonsense\r\n\r\n")
        assert await _ask(port, b"x" * 70_000 + b"\r\n\r\n") == b""
        # Connections that say nothing take up the limit, and no more than that.
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(16)]
        assert await _ask(port, b"GET /metrics HTTP/1.1\r\n\r\n") == b""
        for _, writer in idle:
            writer.close()
    finally:
        await server.stop()


async def test_a_scraper_gets_the_format_that_it_asks_for() -> None:
    registry = CollectorRegistry()
    Counter("asked", "Questions.", registry=registry).inc()
    server = MetricsServer(registry)
    port = await server.start("127.0.0.1", 0)
    try:
        for accept, kind, end in (
            (b"", b"text/plain; version=0.0.4", b"\n"),
            (b"Accept: text/plain\r\n", b"text/plain; version=0.0.4", b"\n"),
            (
                b"accept:application/openmetrics-text;version=1.0.0\r\n",
                b"application/openmetrics-text",
                b"# EOF\n",
            ),
        ):
            answer = await _ask(port, b"GET /metrics HTTP/1.1\r\n" + accept + b"\r\n")
            head, _, body = answer.partition(b"\r\n\r\n")
            assert b"Content-Type: " + kind in head
            assert b"asked_total 1.0\n" in body
            assert body.endswith(end)
    finally:
        await server.stop()
