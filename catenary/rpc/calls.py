"""The calls that a server answers: counted against a limit, and recorded in metrics, spans and logs.

Labels of the metrics are closed sets: registered methods and status names.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import grpc
from prometheus_client import Counter, Gauge, Histogram

from catenary.rpc.errors import refuse
from catenary.telemetry import bind_request, is_request_id, new_id, start_span, unrecorded
from catenary.v1 import common_pb2

UNKNOWN_METHOD = "unknown"

HANDLED = Counter(
    "catenary_rpc_server_handled",
    "Calls that ended, by full method name and gRPC status.",
    ["method", "code"],
)
SECONDS = Histogram(
    "catenary_rpc_server_seconds",
    "Duration of calls, streams included, in seconds.",
    ["method"],
    buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 1, 5, 30, 120, 600),
)
RUNNING = Gauge("catenary_rpc_server_running", "Calls that run now.", ["method"])


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
    """Return the metrics of a method: looking a label up takes longer than counting."""
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
    """Record the block as the answer to a call, or to a message of a stream that is one request.

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


class CallCount:
    """Calls under way, and what streams carry that stands for calls. Of one loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._idle = asyncio.Event()
        self._idle.set()
        self.in_flight = 0
        """Those that have entered and not left."""

    def check(self) -> None:
        """Raise RpcError if there are as many as there may be."""
        if self.in_flight >= self._most:
            raise refuse(
                common_pb2.ERROR_CODE_OVERLOADED,
                f"The service already runs as many calls as it may ({self._most}, max_calls).",
                retryable=True,
                retry_after_ms=1000,
            )

    def enter(self) -> None:
        """Count a call, whatever the limit says."""
        self.in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        """Count the end of a call that has entered."""
        self.in_flight -= 1
        if not self.in_flight:
            self._idle.set()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count the enclosed call as in flight."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    async def wait_idle(self) -> None:
        """Wait until there are none."""
        await self._idle.wait()
