"""The OpenAI API over HTTP: validation, text and streams in front of the router."""

from __future__ import annotations

# First: it refuses a Python that is too old in one line.
import catenary.version  # noqa: F401
from gateway.auth import Caller, read_keys
from gateway.config import GatewayConfig
from gateway.errors import ApiError, bad_request, from_wire, unavailable
from gateway.metrics import GatewayMetrics

__all__ = [
    "ApiError",
    "Caller",
    "GatewayConfig",
    "GatewayMetrics",
    "bad_request",
    "from_wire",
    "read_keys",
    "unavailable",
]
