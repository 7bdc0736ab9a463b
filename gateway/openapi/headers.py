"""Headers of requests that engines work for, and of the answers."""

from __future__ import annotations

from typing import Any

from gateway.caller import (
    LONGEST_WAIT_MS,
    MAX_SESSION_ID,
    MAX_WAIT_MS,
    PRIORITY_CLASS,
    PRIORITY_CLASSES,
    SESSION_ID,
)
from gateway.ignored import IGNORED
from gateway.limits.gate import LIMITED
from gateway.limits.limiter import LIMIT_HEADERS

Described = dict[str, dict[str, Any]]

_REQUEST: Described = {
    PRIORITY_CLASS: {
        "description": "The queue in which it waits; system needs an operator's key",
        "schema": {"type": "string", "enum": list(PRIORITY_CLASSES)},
    },
    MAX_WAIT_MS: {
        "description": "Longest wait for an engine in milliseconds; then 408",
        "schema": {"type": "integer", "minimum": 0, "maximum": LONGEST_WAIT_MS},
    },
    SESSION_ID: {
        "description": "Names the session; counts instead of prompt_cache_key and user",
        "schema": {"type": "string", "maxLength": MAX_SESSION_ID},
    },
}
_TOLD = {
    "limit": ("in a minute", {"type": "integer", "minimum": 0}),
    "remaining": ("left in this minute", {"type": "integer", "minimum": 0}),
    "reset": ("seconds until the minute is over, as in 12.500s", {"type": "string"}),
}


def _limit(header: str) -> dict[str, Any]:
    _, _, what, name = header.split("-")
    meaning, schema = _TOLD[what]
    return {"description": f"Where keys have a limit of {name}: {meaning}", "schema": schema}


_ANSWER: Described = {header: _limit(header) for header in LIMIT_HEADERS}
_IGNORED: Described = {
    IGNORED: {
        "description": "Fields of the request that were taken and have no effect",
        "schema": {"type": "string"},
    }
}


def request_headers(path: str) -> list[dict[str, Any]]:
    """The header parameters of the operation that posts to `path`."""
    if path not in LIMITED:
        return []
    return [{"name": name, "in": "header", "required": False, **rest} for name, rest in _REQUEST.items()]


def answer_headers(path: str, status: int) -> Described:
    """The headers of its answers with this status."""
    if path not in LIMITED or status not in (200, 429):
        return {}
    return _ANSWER | _IGNORED if status == 200 else _ANSWER
