"""Requests for responses that are made to hurt: refused at once, by name."""

from __future__ import annotations

from typing import Any

import pytest

from catenary.telemetry import new_id
from gateway.errors import ApiError
from gateway.responses.request import read_request, response_request
from gateway.schemas.base import RequestLimits

LIMITS = RequestLimits()
TEXT = {"type": "input_text", "text": ""}


def deep(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"properties": {"a": value}}
    return value


def read(**fields: Any) -> None:
    request, passed_on = read_request({"model": "m", "input": "x", **fields}, LIMITS)
    response_request(request, passed_on, [], {}, limits=LIMITS, owner="", store=False)


HOSTILE: list[tuple[str, dict[str, Any], str]] = [
    ("items", {"input": [{"role": "user", "content": "x"}] * 200_000}, "input"),
    ("bad items", {"input": [5] * 4000}, "input.0"),
    ("parts", {"input": [{"role": "user", "content": [TEXT] * 250_000}]}, "input"),
    (
        "outputs",
        {"input": [{"type": "function_call_output", "call_id": "c", "output": [TEXT] * 250_000}]},
        "input",
    ),
    ("fields", {f"f{index}": 1 for index in range(1000)}, ""),
    ("fields of an item", {"input": [{f"f{index}": 1 for index in range(1000)}]}, "input.0"),
    ("tools", {"tools": [{"type": "function", "name": "f"}] * 100_000}, "tools"),
    (
        "deep tool",
        {"tools": [{"type": "function", "name": "f", "parameters": deep(200)}]},
        "tools",
    ),
    ("name", {"tools": [{"type": "function", "name": "f\n{{7*7}}"}]}, "tools.0.name"),
    ("include", {"include": ["x"] * 100_000}, "include"),
    ("metadata", {"metadata": {str(index): "" for index in range(100_000)}}, "metadata"),
    ("id", {"previous_response_id": "r" * 1_000_000}, "previous_response_id"),
    (
        "format",
        {"text": {"format": {"type": "json_schema", "name": "n" * 65, "schema": {}}}},
        "text.format.name",
    ),
    ("salt", {"cache_salt": "s" * 129}, "cache_salt"),
]


@pytest.mark.parametrize(
    ("fields", "param"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE]
)
def test_hostile_requests(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert (caught.value.status, caught.value.param or "") == (400, param)


def test_ids_are_not_to_be_guessed() -> None:
    assert len({new_id("resp_") for _ in range(100)}) == 100
