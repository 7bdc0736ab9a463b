"""A request's sequences and deltas, over a session that the test plays."""

from __future__ import annotations

import json
from typing import Any

import pytest

from catenary.text import Vocabulary
from catenary.v1 import common_pb2
from gateway.constraints import Wanted
from gateway.errors import ApiError, bad_request
from gateway.generation.generation import Generation
from gateway.generation.plan import Prepared, make_plan
from gateway.generation.service import collect
from gateway.link.inbox import FoundBeam, SequenceEnded, SequenceFeed, deliver, ended
from gateway.schemas.base import RequestLimits, parse_request
from gateway.schemas.completion import CompletionRequest
from gateway.streaming.delta import TokenLogprob
from gateway.text.models import Model
from gateway.text.target import Rendered
from tests.support.tiny_tokenizer import EOS_ID, VOCAB_SIZE, byte_ids, tokenizer_json

VOCABULARY = Vocabulary(json.dumps(tokenizer_json()).encode(), sha256="x")
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


class PlayedSession:
    """Takes sequences; the test writes to their feeds."""

    def __init__(self) -> None:
        self.feeds: list[SequenceFeed] = []
        self.hints: list[int | None] = []
        self.aborted: list[int] = []

    def submit(self, spec: Any, feed: SequenceFeed, same_prompt_as: int | None = None) -> int:
        self.feeds.append(feed)
        self.hints.append(same_prompt_as)
        return len(self.feeds)

    def abort(self, handle: int) -> None:
        self.aborted.append(handle)


def generation(session: PlayedSession, *, wanted: Wanted | None = None, **fields: Any) -> Generation:
    body = {"model": "m", "prompt": [byte_ids("ab")], **fields}
    request: Any = parse_request(CompletionRequest, body, RequestLimits())
    prepared = Prepared(
        request_id="r",
        model=Model("m", 100, VOCAB_SIZE, VOCABULARY),
        fields=request,
        prompt=request.prompt,
        prompt_param="prompt",
        default_max_tokens=16,
        wanted=wanted,
    )
    plan = make_plan(prepared, Rendered.of_ids(request.prompt))
    played: Any = session
    return Generation(plan, played, max_unread_tokens=100, deadline=1e12, on_tokens=lambda *_: None)


def beam(
    text: str, reason: Any = LENGTH, stop_token: int | None = None, ends: int | None = None
) -> FoundBeam:
    ids = byte_ids(text) + ([] if ends is None else [ends])
    return FoundBeam(ids, [TokenLogprob(-1.0, (), ())] * len(ids), reason, stop_token)


async def started(running: Generation, session: PlayedSession, *ends: SequenceEnded) -> None:
    """Submit, with the engine's answer at hand."""
    await running.submit(None)
    for feed, end in zip(session.feeds, ends, strict=False):
        feed.finish(end)


async def test_beams_become_choices() -> None:
    session = PlayedSession()
    running = generation(
        session, use_beam_search=True, n=2, best_of=3, logprobs=0, prompt=[byte_ids("a"), byte_ids("b")]
    )
    await started(
        running,
        session,
        SequenceEnded(STOP, beams=(beam("xy", STOP, EOS_ID, EOS_ID), beam("z"))),
        SequenceEnded(LENGTH, beams=(beam("v"), beam("w"))),
    )
    results = await collect(running)
    assert [(result.index, result.text, result.finish_reason) for result in results] == [
        (0, "xy", "stop"),
        (1, "z", "length"),
        (2, "v", "length"),
        (3, "w", "length"),
    ]
    assert [len(result.entries or ()) for result in results] == [2, 1, 1, 1]
    assert running.usage().completion_tokens == 6
    assert (running.done, session.aborted) == (True, [])


@pytest.mark.parametrize(("found", "status"), [(0, 500), (1, 400), (3, 500)])
async def test_more_beams_than_there_are_cannot_be_had(found: int, status: int) -> None:
    session = PlayedSession()
    running = generation(session, use_beam_search=True, n=2)
    await started(running, session, SequenceEnded(STOP, beams=(beam("x"),) * found))
    with pytest.raises(ApiError) as caught:
        await collect(running)
    assert (caught.value.status, caught.value.param) == (status, "n" if status == 400 else None)


@pytest.mark.parametrize(
    ("told", "named"), [("constraint", "response_format"), ("logit_bias", "logit_bias"), (None, None)]
)
async def test_an_error_of_the_constraint_names_the_field_that_it_came_in(
    told: str | None, named: str | None
) -> None:
    session = PlayedSession()
    running = generation(session, wanted=Wanted(common_pb2.CONSTRAINT_KIND_REGEX, "x", "response_format"))
    end = SequenceEnded(common_pb2.FINISH_REASON_ERROR, error=bad_request("It cannot be followed.", told))
    await started(running, session, end)
    with pytest.raises(ApiError) as caught:
        await running.next()
    assert (caught.value.status, caught.value.param) == (400, named)


async def test_choices_wait_for_what_the_first_tells_of_the_prompt() -> None:
    session = PlayedSession()
    running = generation(session, n=2, echo=True, logprobs=0, max_tokens=1)
    await running.submit(None)
    assert session.hints == [None, 1]
    first, second = session.feeds
    value = TokenLogprob(-2.0, (), ())
    second.extend(byte_ids("y"), [value])
    second.finish(SequenceEnded(LENGTH))
    assert await running.next() == []
    first.extend([], [], [value])
    deltas = await running.next()
    assert [(delta.index, delta.text) for delta in deltas] == [(0, "ab")]
    deltas = await running.next()
    assert [(delta.index, delta.text, delta.finish_reason) for delta in deltas] == [(1, "aby", "length")]
    assert [entry.logprob for entry in deltas[0].entries] == [None, value, value]
    first.extend(byte_ids("x"), [value])
    first.finish(SequenceEnded(LENGTH))
    assert [delta.text for delta in await running.next()] == ["x"]
    assert running.done


@pytest.mark.parametrize("count", [0, 2])
async def test_a_wrong_number_of_log_probabilities_is_the_engines_fault(count: int) -> None:
    session = PlayedSession()
    running = generation(session, prompt_logprobs=0)
    await running.submit(None)
    session.feeds[0].extend(byte_ids("x"), [], [TokenLogprob(-1.0, (), ())] * count)
    with pytest.raises(ApiError) as caught:
        await running.next()
    assert caught.value.status == 500


async def test_leaving_aborts_what_goes_on() -> None:
    session = PlayedSession()
    running = generation(session, n=2, stop="q")
    async with running:
        await running.submit(None)
        session.feeds[0].extend(byte_ids("pq"), [])
        (delta,) = await running.next()
        assert (delta.text, delta.finish_reason, delta.stop_reason) == ("p", "stop", "q")
    assert session.aborted == [1, 2]


async def test_hypotheses_come_off_the_wire() -> None:
    found = common_pb2.Hypothesis(
        token_ids=[5, 2],
        score=-1.0,
        reason=STOP,
        stop_token_id=2,
        logprobs=common_pb2.LogprobColumns(
            rows=[0], sampled=[-1, -2], top_counts=[0, 1], top_ids=[9], top_logprobs=[-3]
        ),
    )
    end = common_pb2.SequenceEnd(row=0, reason=STOP, hypotheses=[found])
    step = common_pb2.StepOutput(handles=[7], token_counts=[0], ends=[end])
    session = PlayedSession()
    running = generation(session)
    await running.submit(None)
    (feed,) = session.feeds
    ((handle, told),) = deliver(step, {7: feed}.get)
    assert handle == 7
    assert told is not None
    feed.finish(ended(told))
    batch = feed.take()
    assert batch.end is not None
    assert batch.end.beams == (
        FoundBeam([5, 2], [TokenLogprob(-1.0, (), ()), TokenLogprob(-2.0, (9,), (-3.0,))], STOP, 2),
    )
