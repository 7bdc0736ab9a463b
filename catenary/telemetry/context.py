"""The request that a piece of work belongs to: id and W3C trace context, carried by context variables."""

from __future__ import annotations

import re
import secrets
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_request_id: ContextVar[str | None] = ContextVar("catenary_request_id", default=None)
_traceparent: ContextVar[str | None] = ContextVar("catenary_traceparent", default=None)

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")


@contextmanager
def bind_request(request_id: str, traceparent: str | None) -> Iterator[None]:
    """Name the request that the block works for. Logs and outgoing RPCs of the block carry both values."""
    id_token = _request_id.set(request_id)
    trace_token = _traceparent.set(traceparent)
    try:
        yield
    finally:
        _request_id.reset(id_token)
        _traceparent.reset(trace_token)


@contextmanager
def bind_traceparent(traceparent: str) -> Iterator[None]:
    """Run the block for this span of the request at hand."""
    token = _traceparent.set(traceparent)
    try:
        yield
    finally:
        _traceparent.reset(token)


def request_id() -> str | None:
    """Return the id of the request at hand, or None outside of one."""
    return _request_id.get()


def current_traceparent() -> str | None:
    """Return the W3C trace context of the request at hand, or None."""
    return _traceparent.get()


def current_trace_id() -> str | None:
    """Return the 32 hex digits of the trace at hand, or None."""
    match = _TRACEPARENT.fullmatch(_traceparent.get() or "")
    return match[1] if match else None


def child_traceparent(parent: str | None) -> str:
    """Return a valid W3C traceparent with a new span id, in the trace of the parent if that is valid."""
    match = _TRACEPARENT.fullmatch(parent) if parent else None
    trace_id, flags = (match[1], match[2]) if match else (_nonzero_hex(16), "01")
    return f"00-{trace_id}-{_nonzero_hex(8)}-{flags}"


def is_request_id(value: str) -> bool:
    """Whether a caller's id is fit for logs and headers: 1..128 characters of a harmless set."""
    return _REQUEST_ID.fullmatch(value) is not None


def new_id(prefix: str) -> str:
    """Return a fresh id: the prefix and 32 hex digits."""
    return f"{prefix}{uuid.uuid4().hex}"


def _nonzero_hex(size: int) -> str:
    while not int(value := secrets.token_hex(size), 16):
        continue
    return value
