"""Rows out of a step and back into one, and what is merged in between."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary.v1 import common_pb2
from services.router.dispatch.columns import MalformedStep, PendingRow, join, split

ids = st.integers(0, 2**32 - 1)
scores = st.floats(width=32, allow_nan=False)
token = st.tuples(ids, scores, st.lists(st.tuples(ids, scores), max_size=3))
row = st.tuples(st.lists(token, max_size=4), st.booleans(), st.booleans())


def step_of(rows, first_handle: int = 1) -> common_pb2.StepOutput:
    step = common_pb2.StepOutput()
    for index, (tokens, scored, ended) in enumerate(rows):
        step.handles.append(first_handle + index)
        step.token_counts.append(len(tokens))
        step.token_ids.extend(token[0] for token in tokens)
        if scored:
            step.logprobs.rows.append(index)
            for _, value, tops in tokens:
                step.logprobs.sampled.append(value)
                step.logprobs.top_counts.append(len(tops))
                step.logprobs.top_ids.extend(top[0] for top in tops)
                step.logprobs.top_logprobs.extend(top[1] for top in tops)
        if ended:
            step.ends.add(row=index, reason=common_pb2.FINISH_REASON_STOP)
    return step


def pending(step: common_pb2.StepOutput) -> list[PendingRow]:
    rows = []
    for part in split(step):
        merged = PendingRow(part.handle)
        merged.append(part)
        merged.end = part.end
        rows.append(merged)
    return rows


@given(st.lists(row, max_size=6))
def test_splitting_and_joining_is_the_identity(rows):
    step = step_of(rows)
    assert join(pending(step)) == step


@given(st.lists(token, min_size=1, max_size=8), st.integers(0, 8), st.booleans())
def test_merging_two_steps_equals_one_step_of_both(tokens, cut, scored):
    whole = step_of([(tokens, scored, False)])
    merged = PendingRow(1)
    for part in (tokens[:cut], tokens[cut:]):
        for piece in split(step_of([(part, scored, False)])):
            merged.append(piece)
    assert join([merged]) == whole


def test_columns_that_contradict_one_another_are_refused_before_any_row():
    for broken in (
        common_pb2.StepOutput(handles=[1], token_counts=[1]),
        common_pb2.StepOutput(handles=[1], token_counts=[1, 0], token_ids=[4]),
        common_pb2.StepOutput(handles=[1], token_counts=[0], ends=[{"row": 1, "reason": 1}]),
        common_pb2.StepOutput(handles=[1], token_counts=[0], logprobs={"rows": [1]}),
        common_pb2.StepOutput(handles=[1], token_counts=[0], logprobs={"rows": [0, 0]}),
        common_pb2.StepOutput(handles=[1], token_counts=[0], logprobs={"rows": [0], "sampled": [1.0]}),
        common_pb2.StepOutput(
            handles=[1],
            token_counts=[1],
            token_ids=[4],
            logprobs={"rows": [0], "sampled": [1.0], "top_counts": [2], "top_ids": [1]},
        ),
    ):
        with pytest.raises(MalformedStep):
            split(broken)


def test_weight_counts_tokens_and_alternatives():
    (plain,) = pending(step_of([([(1, 0.0, [])] * 3, False, False)]))
    (scored,) = pending(step_of([([(1, 0.0, [(2, 0.0), (3, 0.0)])] * 3, True, False)]))
    assert plain.weight == 4
    assert scored.weight == 16
