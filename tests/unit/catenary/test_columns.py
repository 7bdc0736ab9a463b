"""Rows out of a step and back into one, and what is merged in between."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary.columns import MalformedStep, StepRow, join, split
from catenary.v1 import common_pb2

ids = st.integers(0, 2**32 - 1)
scores = st.floats(width=32, allow_nan=False)
token = st.tuples(ids, scores, st.lists(st.tuples(ids, scores), max_size=3))
prompt = st.lists(st.tuples(scores, st.lists(st.tuples(ids, scores), max_size=3)), max_size=3)
row = st.tuples(st.lists(token, max_size=4), st.booleans(), st.booleans(), prompt)


def step_of(rows, first_handle: int = 1) -> common_pb2.StepOutput:
    step = common_pb2.StepOutput()
    for index, (tokens, scored, ended, *prompts) in enumerate(rows):
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
        columns = step.prompt_logprobs if any(prompts) else None
        if columns is not None:
            columns.rows.append(index)
            columns.counts.append(len(prompts[0]))
            for value, tops in prompts[0]:
                columns.logprobs.append(value)
                columns.top_counts.append(len(tops))
                columns.top_ids.extend(top[0] for top in tops)
                columns.top_logprobs.extend(top[1] for top in tops)
        if ended:
            step.ends.add(row=index, reason=common_pb2.FINISH_REASON_STOP)
    return step


@settings(deadline=None)
@given(st.lists(row, max_size=6))
def test_splitting_and_joining_is_the_identity(rows):
    step = step_of(rows)
    assert join(split(step)) == step


@settings(deadline=None)
@given(st.lists(st.tuples(st.lists(token, max_size=4), prompt), max_size=4), st.booleans())
def test_merging_steps_then_splitting_gives_the_parts_in_order(parts, scored):
    tokens = [token for part, _ in parts for token in part]
    prompts = [score for _, part in parts for score in part]
    whole = step_of([(tokens, scored and bool(parts), False, prompts)])
    merged = StepRow(1)
    for part, asked in parts:
        for piece in split(step_of([(part, scored, False, asked)])):
            merged.append(piece)
    assert join([merged]) == whole
    assert list(split(join([merged]))) == [merged]


def test_merging_leaves_an_end_to_whoever_decides_it():
    merged, last = StepRow(1, [5]), StepRow(1, [6], end=common_pb2.SequenceEnd(reason=1))
    merged.append(last)
    assert merged == StepRow(1, [5, 6])


def test_columns_that_contradict_one_another_are_refused_before_any_row():
    for broken in (
        common_pb2.StepOutput(handles=[1], token_counts=[1]),
        common_pb2.StepOutput(handles=[1], token_counts=[1, 0], token_ids=[4]),
        common_pb2.StepOutput(handles=[1], token_counts=[0], ends=[{"row": 1, "reason": 1}]),
        common_pb2.StepOutput(handles=[1], token_counts=[0], ends=[{"reason": 1}, {"reason": 2}]),
        common_pb2.StepOutput(handles=[1, 2, 1], token_counts=[0, 0, 0]),
        common_pb2.StepOutput(handles=[1], token_counts=[0], logprobs={"rows": [1]}),
        common_pb2.StepOutput(handles=[1], token_counts=[0], logprobs={"rows": [0, 0]}),
        common_pb2.StepOutput(handles=[1], token_counts=[0], logprobs={"rows": [0], "sampled": [1.0]}),
        common_pb2.StepOutput(
            handles=[1],
            token_counts=[1],
            token_ids=[4],
            logprobs={"rows": [0], "sampled": [1.0], "top_counts": [2], "top_ids": [1]},
        ),
        common_pb2.StepOutput(handles=[1], token_counts=[0], prompt_logprobs={"rows": [1], "counts": [0]}),
        common_pb2.StepOutput(handles=[1], token_counts=[0], prompt_logprobs={"rows": [0], "counts": [0]}),
        common_pb2.StepOutput(handles=[1], token_counts=[0], prompt_logprobs={"rows": [0]}),
        common_pb2.StepOutput(handles=[1], token_counts=[0], prompt_logprobs={"rows": [0], "counts": [1]}),
        common_pb2.StepOutput(
            handles=[1],
            token_counts=[0],
            prompt_logprobs={"rows": [0], "counts": [1], "logprobs": [1.0, 2.0], "top_counts": [0, 0]},
        ),
    ):
        with pytest.raises(MalformedStep):
            split(broken)


def test_weight_counts_tokens_and_alternatives():
    (plain,) = split(step_of([([(1, 0.0, [])] * 3, False, False)]))
    (scored,) = split(step_of([([(1, 0.0, [(2, 0.0), (3, 0.0)])] * 3, True, False)]))
    (asked,) = split(step_of([([], False, False, [(0.0, [(2, 0.0), (3, 0.0)])] * 3)]))
    assert plain.weight == 4
    assert asked.weight == 19
    assert scored.weight == 16
