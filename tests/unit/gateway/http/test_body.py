"""JSON of requests: read, or refused before it costs too much."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from gateway.errors import ApiError
from gateway.http import request
from gateway.http.request import BodyLimits, read_json_object, too_many_values

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('a"\\[]{},:\n'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('a"\\[{'), inner),
    max_leaves=20,
)


def count(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + count(inner) for inner in value.values())
    if isinstance(value, list):
        return 1 + sum(map(count, value))
    return int(isinstance(value, str))


@given(VALUES, st.integers(1, 9), st.booleans())
def test_strings_arrays_and_objects_are_counted_exactly(value: Any, piece: int, indent: bool) -> None:
    text, most = json.dumps(value, indent=2 if indent else None).encode(), count(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request, "_SLICE", piece)
        patch.setattr(request, "NUMBERS", 1000)
        assert not asyncio.run(too_many_values(text, max(most, 1)))
        if most > 1:
            assert asyncio.run(too_many_values(text, most - 1))


async def read(data: bytes, most: int = 10) -> dict[str, Any]:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": data, "more_body": False}

    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")]}
    return await read_json_object(Request(scope, receive), BodyLimits(1000, most, 10))


async def test_a_byte_order_mark_is_skipped() -> None:
    assert await read(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}
    with pytest.raises(ApiError):
        await read(b'\xef\xbb\xbf\xef\xbb\xbf{"a": 1}')


async def test_numbers_count_a_tenth() -> None:
    assert await read(b'{"a": [%s]}' % b",".join([b"1"] * 90))
    with pytest.raises(ApiError, match="or of 100 values in all"):
        await read(b'{"a": [%s]}' % b",".join([b"1"] * 101))


async def test_a_body_of_many_values_is_refused_before_it_is_decoded() -> None:
    assert await read(b'{"a": ["[[[[[[[[[[[[[[[[[[[[", 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]}')
    with pytest.raises(ApiError, match="limit of 10 strings, arrays and objects") as refused:
        await read(b'{"a": [[],[],[],[],[],[],[],[],[]]}')
    assert (refused.value.status, refused.value.code) == (400, "invalid_json")
