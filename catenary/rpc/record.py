"""What is told of each call that a server answers: its context, its metrics, its span."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import grpc
from prometheus_client import Counter, Gauge, Histogram

from catenary.rpc.metrics import HANDLED, RUNNING, SECONDS
from catenary.telemetry import bind_request, is_request_id, new_id, start_span, unrecorded

# All methods of a service with all statuses are fewer.
_METHODS = 1024
# Whose fault the server's is: by OpenTelemetry's conventions its spans tell of no other errors.
_FAULTS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)


@lru_cache(maxsize=_METHODS)
def _of_method(label: str) -> tuple[Gauge, Histogram]:
    """Looking a label up takes longer than counting."""
    return RUNNING.labels(label), SECONDS.labels(label)


@lru_cache(maxsize=_METHODS)
def _handled(label: str, code: str) -> Counter:
    return HANDLED.labels(label, code)


@dataclass(slots=True)
class CallRecord:
    """`code`: how the call ends; to be set inside."""

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN


@contextmanager
def recorded(
    method: str, caller_request_id: str, parent: str | None, *, label: str, spanned: bool = True
) -> Iterator[CallRecord]:
    """The block answers a call, or a message of a stream that is one request.

    Args:
        method: full name, such as `/catenary.v1.TokenizerService/Render`.
        caller_request_id: the caller's, which is taken over if it is well formed.
        parent: the caller's traceparent.
        label: what metrics name the method.
        spanned: it has a span of its own.
    """
    started = time.monotonic()
    request_id = caller_request_id if is_request_id(caller_request_id) else new_id("rpc-")
    span = start_span(method[1:], parent, server=True) if spanned else unrecorded(parent)
    record = CallRecord()
    running, seconds = _of_method(label)
    running.inc()
    try:
        with bind_request(request_id, span.traceparent):
            yield record
    except asyncio.CancelledError:
        record.code = grpc.StatusCode.CANCELLED
        raise
    finally:
        code = record.code
        running.dec()
        _handled(label, code.name).inc()
        seconds.observe(time.monotonic() - started)
        span.end(
            {
                "rpc.system": "grpc",
                "rpc.grpc.status_code": int(code.value[0]),
                "catenary.request_id": request_id,
            },
            error=code.name if code in _FAULTS else None,
        )
