"""Bounds of JSON values."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary.json_bounds import Excess, json_excess, json_levels

VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=12,
)


def depth_of(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(depth_of, value.values() if isinstance(value, dict) else value), default=0)


def size_of(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    inner = list(value.values() if isinstance(value, dict) else value)
    return len(inner) + sum(map(size_of, inner))


@given(VALUES)
def test_a_value_is_within_its_own_bounds_and_beyond_any_less(value: Any) -> None:
    depth, size = depth_of(value), size_of(value)
    assert json_excess(value, depth, size) is None
    assert sum(map(len, json_levels(value))) == size + 1
    if depth:
        assert json_excess(value, depth - 1, size) is Excess.DEPTH
    if size:
        assert json_excess(value, depth, size - 1) is Excess.VALUES


@pytest.mark.parametrize("value", [[], {}, [[]], {"a": {}}])
def test_an_empty_array_counts_as_deep_as_a_full_one(value: Any) -> None:
    assert json_excess(value, depth_of(value) - 1, 100) is Excess.DEPTH


def test_what_is_beyond_is_not_walked() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert json_excess(deep, 64, 10**6) is Excess.DEPTH
