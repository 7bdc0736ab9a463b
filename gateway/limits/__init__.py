"""Limits per API key: requests and tokens in a minute, requests at a time; counted here or in Redis."""

from __future__ import annotations

from gateway.limits.allowance import COUNTED, Allowance, Tried, current_allowance
from gateway.limits.gate import LIMITED, LimitGate
from gateway.limits.limiter import BEYOND_ITS_KEY, LIMIT_HEADERS, KeyLimits, Limiter
from gateway.limits.options import limiter_of

__all__ = [
    "BEYOND_ITS_KEY",
    "COUNTED",
    "LIMITED",
    "LIMIT_HEADERS",
    "Allowance",
    "KeyLimits",
    "LimitGate",
    "Limiter",
    "Tried",
    "current_allowance",
    "limiter_of",
]
