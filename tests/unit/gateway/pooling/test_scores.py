"""Scores of texts from their vectors."""

from __future__ import annotations

import math
import struct
from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from catenary.v1 import common_pb2
from gateway.pooling.answers import scores_of
from gateway.pooling.work import Pooled, Work

numbers = st.floats(-1e4, 1e4, width=32)
pairs = st.integers(1, 40).flatmap(
    lambda size: st.tuples(*[st.lists(numbers, min_size=size, max_size=size)] * 2)
)


def score(one: list[float], other: list[float]) -> float:
    vectors = [struct.pack(f"<{len(vector)}f", *vector) for vector in (one, other)]
    work = Work(common_pb2.MODEL_TASK_EMBED, "input", texts=["a", "b"], compared=[(0, 1)])
    (found,) = scores_of(Pooled("id", 0, cast("Any", None), work, [], vectors))
    return found


@given(pairs)
def test_scores_are_cosines_and_within_one(pair: tuple[list[float], list[float]]) -> None:
    one, other = (np.array(vector, dtype=np.float64) for vector in pair)
    lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
    found = score(*pair)
    assert -1 <= found <= 1
    assert math.isclose(found, float(one @ other) / lengths if lengths else 0.0, abs_tol=1e-9)


def test_a_text_is_as_near_to_itself_as_can_be() -> None:
    # 1.0000000000000002 without a bound.
    vector = [0.3, 0.7, 0.9]
    assert score(vector, vector) == 1
    assert score(vector, [-number for number in vector]) == -1
