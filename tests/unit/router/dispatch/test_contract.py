"""What an engine says of its sequences: what it is given up for, and what is put right."""

from __future__ import annotations

import pytest

from catenary.columns import MalformedStep
from catenary.v1 import common_pb2
from services.router.dispatch import LossReason
from tests.support.dispatcher import World

VOCAB = 100
FAULT = common_pb2.ERROR_CODE_INTERNAL


def placed(*, logprobs: int | None = None, prompt: int | None = None, max_tokens: int = 3, **fields):
    """A world with one engine that has one sequence; world, link and handle."""
    world = World()
    link = world.attach()
    spec = common_pb2.SequenceSpec(
        model="m",
        token_ids=fields.pop("token_ids", [1, 2]),
        stopping=fields.pop("stopping", common_pb2.StoppingParams(max_tokens=max_tokens)),
        response=common_pb2.ResponseOptions(top_logprobs=logprobs, prompt_logprobs=prompt),
        **fields,
    )
    world.sequences[1] = world.dispatcher.submit(1, spec, world.sink)
    return world, link, next(iter(link.sequences))


def step_of(handle: int, *tokens: int, **fields) -> common_pb2.StepOutput:
    return common_pb2.StepOutput(handles=[handle], token_counts=[len(tokens)], token_ids=tokens, **fields)


def scores(tops: list[list[int]]) -> dict[str, list]:
    ids = [top for token in tops for top in token]
    return {
        "rows": [0],
        "sampled": [-0.5] * len(tops),
        "top_counts": [len(token) for token in tops],
        "top_ids": ids,
        "top_logprobs": [-1.0] * len(ids),
    }


def prompt_scores(tops: list[list[int]]) -> dict[str, list]:
    columns = scores(tops)
    return {"counts": [len(tops)], "logprobs": columns.pop("sampled"), **columns}


@pytest.mark.parametrize(
    ("logprobs", "tokens", "fields"),
    [
        (None, [VOCAB], {}),
        (None, [5, 5, 5, 5], {}),
        (None, [5], {"ends": [{"reason": 0}]}),
        (None, [5], {"ends": [{"reason": 5}]}),
        (None, [5], {"ends": [{"reason": 1}, {"reason": 2}]}),
        (None, [5], {"ends": [{"reason": 1, "stop_token_id": VOCAB}]}),
        (2, [5], {}),
        (2, [5], {"logprobs": scores([[1, VOCAB]])}),
        (2, [5], {"logprobs": scores([[1, 2, 3]])}),
        (0, [5], {"logprobs": scores([[1]])}),
    ],
)
def test_a_breach_is_raised_and_its_sequence_can_be_tried_again(logprobs, tokens, fields):
    world, link, handle = placed(logprobs=logprobs)
    with pytest.raises(MalformedStep):
        world.send(link, step=step_of(handle, *tokens, **fields))
    assert not world.sink.over
    world.membership.leave(link, LossReason.PROTOCOL)
    assert world.sink.over[1].error.code == common_pb2.ERROR_CODE_ENGINE_LOST
    assert world.sink.over[1].error.retryable
    world.check_idle()


STOP = {"reason": common_pb2.FINISH_REASON_STOP}


@pytest.mark.parametrize(
    ("stopping", "token", "honest"),
    [
        ({}, 2, True),
        ({"ignore_eos": True}, 2, False),
        ({"stop_token_ids": [9]}, 9, True),
        ({"stop_token_ids": [9], "ignore_eos": True}, 9, True),
        ({"stop_token_ids": [9]}, 8, False),
    ],
)
def test_a_stop_is_by_a_token_that_the_request_or_the_model_names(stopping, token, honest):
    world, link, handle = placed(stopping=common_pb2.StoppingParams(max_tokens=3, **stopping))
    step = step_of(handle, 5, token, ends=[{**STOP, "stop_token_id": token}])
    if honest:
        world.send(link, step=step)
        assert world.sink.over[1].stop_token_id == token
        return
    with pytest.raises(MalformedStep, match="stop"):
        world.send(link, step=step)
    assert not world.sink.over


def test_a_constrained_sequence_may_end_by_an_id_that_it_ignores():
    stopping = common_pb2.StoppingParams(max_tokens=3, ignore_eos=True)
    constraint = common_pb2.Constraint(kind=common_pb2.CONSTRAINT_KIND_REGEX, source="a")
    world, link, handle = placed(stopping=stopping, constraint=constraint)
    world.send(link, step=step_of(handle, 5, 2, ends=[{**STOP, "stop_token_id": 2}]))
    assert world.sink.over[1].stop_token_id == 2


def test_a_stop_is_by_the_last_token_and_nothing_else_has_one():
    world, link, handle = placed()
    with pytest.raises(MalformedStep):
        world.send(link, step=step_of(handle, 5, ends=[{**STOP, "stop_token_id": 2}]))
    world, link, handle = placed()
    world.send(link, step=step_of(handle, 5, ends=[{"reason": 2, "stop_token_id": 5}]))
    assert not world.sink.over[1].HasField("stop_token_id")


def test_a_handle_with_two_rows_in_one_step_is_a_breach():
    world, link, handle = placed()
    twice = common_pb2.StepOutput(handles=[handle, handle], token_counts=[1, 1], token_ids=[5, 5])
    with pytest.raises(MalformedStep):
        world.send(link, step=twice)


def test_what_was_asked_for_passes():
    world, link, handle = placed(logprobs=2)
    world.send(link, step=step_of(handle, 5, 99, logprobs=scores([[1, 99], [3]])))
    world.send(link, step=step_of(handle, 7, logprobs=scores([[]]), ends=[{"reason": 2}]))
    assert world.sink.rows[1].token_ids == [5, 99, 7]
    assert world.sink.rows[1].logprobs.top_ids == [1, 99, 3]
    assert world.sink.over[1].reason == common_pb2.FINISH_REASON_LENGTH


def test_log_probabilities_that_nobody_asked_for_are_taken_off():
    world, link, handle = placed()
    world.send(link, step=step_of(handle, 5, logprobs=scores([[1]])))
    assert world.sink.rows[1].logprobs is None


def test_prompt_log_probabilities_pass_before_the_first_token_and_with_it():
    for early in (0, 1, 2):
        world, link, handle = placed(prompt=2, token_ids=[1, 2, 3, 4], prompt_len=3)
        tops = [[1, 99], [5]]
        if early:
            world.send(link, step=step_of(handle, prompt_logprobs=prompt_scores(tops[:early])))
        rest = {"prompt_logprobs": prompt_scores(tops[early:])} if early < 2 else {}
        world.send(link, step=step_of(handle, 5, **rest))
        assert world.sink.rows[1].prompt_logprobs.top_ids == [1, 99, 5]
        assert world.sink.rows[1].token_ids == [5]


@pytest.mark.parametrize(
    ("tokens", "tops"),
    [([5], None), ([5], [[1]]), ([5], [[1]] * 3), ([], [[1]] * 3), ([5], [[1, 2, 3], [1]]), ([], [[VOCAB]])],
)
def test_prompt_log_probabilities_that_are_missing_or_too_many_are_a_breach(tokens, tops):
    world, link, handle = placed(prompt=2, token_ids=[1, 2, 3])
    fields = {} if tops is None else {"prompt_logprobs": prompt_scores(tops)}
    with pytest.raises(MalformedStep):
        world.send(link, step=step_of(handle, *tokens, **fields))


def test_prompt_log_probabilities_that_nobody_asked_for_are_taken_off():
    world, link, handle = placed()
    world.send(link, step=step_of(handle, 5, prompt_logprobs=prompt_scores([[1]])))
    assert world.sink.rows[1].prompt_logprobs is None


def test_the_tokens_of_a_replayed_sequence_count_against_its_limit():
    world, link, handle = placed(token_ids=[1, 2, 3, 4], prompt_len=2)
    world.send(link, step=step_of(handle, 5))
    with pytest.raises(MalformedStep):
        world.send(link, step=step_of(handle, 5))


def test_no_more_tokens_than_the_context_holds_even_without_a_limit():
    world, link, handle = placed(max_tokens=1000)
    world.send(link, step=step_of(handle, *[5] * 62))
    with pytest.raises(MalformedStep):
        world.send(link, step=step_of(handle, 5))


def test_counters_are_those_of_the_router_and_no_more_is_cached_than_the_prompt_has():
    world, link, handle = placed()
    usage = {"prompt_tokens": 900, "cached_tokens": 800, "completion_tokens": 700}
    error = {"code": FAULT, "message": "stray"}
    world.send(link, step=step_of(handle, 5, ends=[{"reason": 1, "usage": usage, "error": error}]))
    end = world.sink.over[1]
    assert (end.usage.prompt_tokens, end.usage.cached_tokens, end.usage.completion_tokens) == (2, 2, 1)
    assert not end.HasField("error")


@pytest.mark.parametrize("error", [None, {}, {"code": 0, "message": "who knows"}, {"code": 99}])
def test_an_error_that_is_missing_or_unknown_is_internal_and_retryable(error):
    world, link, handle = placed()
    world.send(link, step=step_of(handle, ends=[{"reason": 4, "error": error}]))
    end = world.sink.over[1]
    assert (end.error.code, end.error.retryable, bool(end.error.message)) == (FAULT, True, True)

    world, link, handle = placed()
    world.send(link, refusal=common_pb2.Refusal(handle=handle, error=error))
    refused = world.sink.over[1]
    assert (refused.code, refused.retryable, bool(refused.message)) == (FAULT, True, True)
    world.check_idle()


def test_texts_of_any_size_are_cut():
    huge = {
        "code": common_pb2.ERROR_CODE_INVALID_ARGUMENT,
        "message": "é" * 100_000,
        "param": "p" * 100_000,
        "retry_after_ms": (1 << 32) - 1,
    }
    world, link, handle = placed()
    world.send(link, refusal=common_pb2.Refusal(handle=handle, error=huge))
    error = world.sink.over[1]
    assert error.code == common_pb2.ERROR_CODE_INVALID_ARGUMENT
    assert (len(error.message), len(error.param), error.retry_after_ms) == (512, 128, 3_600_000)

    world, link, handle = placed()
    world.send(link, step=step_of(handle, ends=[{"reason": 4, "error": huge}]))
    assert world.sink.over[1].error == error
