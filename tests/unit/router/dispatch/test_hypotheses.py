"""Hypotheses of beam searches: what an engine is given up for, and what is put right."""

from __future__ import annotations

from typing import Any

import pytest

from catenary.columns import MalformedStep
from catenary.v1 import common_pb2
from tests.unit.router.dispatch.test_contract import VOCAB, placed, scores, step_of

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


def searched(*, logprobs: int | None = None, results: int = 2):
    """A world with one engine that has one search of three beams; world, link and handle."""
    beams = common_pb2.BeamSearch(width=3, results=results, length_penalty=1)
    return placed(logprobs=logprobs, beam_search=beams)


def found(*tokens: int, score: float = -1.0, reason: Any = LENGTH, **fields: Any) -> common_pb2.Hypothesis:
    return common_pb2.Hypothesis(token_ids=tokens, score=score, reason=reason, **fields)


def end_of(handle: int, *hypotheses: common_pb2.Hypothesis, reason: Any = LENGTH) -> common_pb2.StepOutput:
    return step_of(handle, ends=[common_pb2.SequenceEnd(reason=reason, hypotheses=hypotheses)])


def test_what_is_found_reaches_the_client_with_its_tokens_counted():
    world, link, handle = searched(logprobs=1)
    one = found(5, 6, 7, logprobs=scores([[5], [], [9]]))
    other = found(2, score=-2, reason=STOP, stop_token_id=2, logprobs=scores([[]]))
    world.dispatcher.on_step(link, end_of(handle, one, other))
    end = world.sink.over[1]
    assert list(end.hypotheses) == [one, other]
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (2, 4)
    assert world.admission.live_sequences == 0


@pytest.mark.parametrize(
    "hypotheses",
    [
        [],
        [found(1), found(2), found(3)],
        [found()],
        [found(1, 2, 3, 4)],
        [found(VOCAB)],
        [found(1, stop_token_id=VOCAB)],
        [found(1, reason=STOP, stop_token_id=1)],
        [found(1, reason=STOP, stop_token_id=2)],
        [found(1, reason=common_pb2.FINISH_REASON_ABORT)],
        [found(1, reason=common_pb2.FINISH_REASON_UNSPECIFIED)],
        [found(1, score=float("nan"))],
        [found(1, score=float("-inf"))],
        [found(1, score=-2), found(2, score=-1)],
    ],
)
def test_bad_hypotheses_are_a_breach(hypotheses):
    world, link, handle = searched()
    with pytest.raises(MalformedStep):
        world.dispatcher.on_step(link, end_of(handle, *hypotheses))


@pytest.mark.parametrize(
    "columns",
    [
        None,
        {**scores([[1]]), "rows": [1]},
        scores([[1], [1]]),
        scores([[1, 2]]),
        scores([[VOCAB]]),
        {**scores([[1]]), "sampled": []},
        {**scores([[1]]), "top_logprobs": []},
        {**scores([[1]]), "top_counts": [0]},
    ],
)
def test_bad_log_probabilities_are_a_breach(columns):
    world, link, handle = searched(logprobs=1)
    with pytest.raises(MalformedStep):
        world.dispatcher.on_step(link, end_of(handle, found(1, logprobs=columns)))


def test_tokens_before_the_end_are_a_breach():
    world, link, handle = searched()
    with pytest.raises(MalformedStep):
        world.dispatcher.on_step(link, step_of(handle, 5))


def test_what_nobody_asked_for_is_taken_off():
    world, link, handle = searched()
    world.dispatcher.on_step(link, end_of(handle, found(5, logprobs=scores([[]]))))
    assert not world.sink.over[1].hypotheses[0].HasField("logprobs")
    world, link, handle = searched()
    world.dispatcher.on_step(link, end_of(handle, found(5), reason=common_pb2.FINISH_REASON_ABORT))
    assert not world.sink.over[1].hypotheses
    world, link, handle = placed()
    world.dispatcher.on_step(link, end_of(handle, found(5)))
    assert not world.sink.over[1].hypotheses


def test_a_search_needs_room_for_its_beams():
    world, link, _ = searched()
    assert (world.admission.live_sequences, link.engine.placed_sequences) == (3, 3)
    assert link.engine.room >= 3
    link.engine.placed_sequences += 1
    assert link.engine.room < 3
    assert link.engine.room >= 2
