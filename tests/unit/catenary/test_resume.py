"""A sequence through any schedule of failures: the same stream, the same counts, and an end to trying."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary.resume import (
    POISONED,
    Again,
    Cause,
    Failure,
    Finished,
    GivenUp,
    Passed,
    Resumable,
    ResumePolicy,
    Verdict,
)
from catenary.v1 import common_pb2
from services.engine.scripted import continuation

VOCAB = 500
LENGTH, STOP = common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_STOP
POLICY = ResumePolicy()


def error(code: common_pb2.ErrorCode.ValueType, *, retryable: bool = True, **fields: Any) -> common_pb2.Error:
    return common_pb2.Error(code=code, message="No.", retryable=retryable, **fields)


LOST = error(common_pb2.ERROR_CODE_ENGINE_LOST)
DRAINING = error(common_pb2.ERROR_CODE_DRAINING)
AWAY = error(common_pb2.ERROR_CODE_UNAVAILABLE, retry_after_ms=300)
FULL = error(common_pb2.ERROR_CODE_OVERLOADED)


def failed(told: common_pb2.Error, **usage: int) -> Failure:
    end = common_pb2.SequenceEnd(
        reason=common_pb2.FINISH_REASON_ERROR, error=told, usage=common_pb2.Usage(**usage)
    )
    return Failure.of_end(end)


def spec(prompt: list[int], max_tokens: int | None = 20, **fields: Any) -> common_pb2.SequenceSpec:
    return common_pb2.SequenceSpec(
        request_id="r",
        model="m",
        token_ids=prompt,
        sampling=common_pb2.SamplingParams(seed=3),
        stopping=common_pb2.StoppingParams(max_tokens=max_tokens, **fields.pop("stopping", {})),
        **fields,
    )


@dataclass
class Engine:
    """Computes a life of a spec: tokens, and log probabilities of its prompt if they are asked for."""

    given: common_pb2.SequenceSpec
    tokens: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        given = self.given
        ids = list(given.token_ids)
        prompt_len = given.prompt_len if given.HasField("prompt_len") else len(ids)
        left = given.stopping.max_tokens - (len(ids) - prompt_len)
        assert left > 0, "an engine refuses what has all its tokens"
        self.tokens = continuation(ids, left, seed=given.sampling.seed, vocab_size=VOCAB)
        if given.response.HasField("prompt_logprobs"):
            assert len(ids) == prompt_len
            self.scores = [token / 7 for token in ids[1:]]


class Reader:
    """What a client has got."""

    def __init__(self, sequence: Resumable) -> None:
        self.sequence = sequence
        self.tokens: list[int] = []
        self.scores: list[float] = []

    def read(self, engine: Engine, tokens: int, scores: int) -> bool:
        """Pass on so much of a life; whether that was all."""
        told = engine.scores if tokens else engine.scores[:scores]
        if told:
            self.scores += told[self.sequence.record_prompt(len(told)) :]
        self.sequence.record(engine.tokens[:tokens])
        self.tokens += engine.tokens[:tokens]
        return tokens >= len(engine.tokens)


FAILURES = st.sampled_from(
    [
        failed(DRAINING),
        Failure.router_lost(),
        failed(error(common_pb2.ERROR_CODE_UNAVAILABLE)),
        Failure.of_end(common_pb2.SequenceEnd(reason=common_pb2.FINISH_REASON_ABORT)),
        Failure.of_refusal(AWAY),
        Failure.of_refusal(error(common_pb2.ERROR_CODE_MODEL_NOT_FOUND, retryable=False)),
    ]
)
LIVES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9), FAILURES), max_size=12)


@settings(deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
    replayed=st.integers(0, 3),
    max_tokens=st.integers(4, 25),
    scored=st.booleans(),
    shared=st.booleans(),
    lives=LIVES,
)
def test_no_schedule_of_failures_is_noticed(
    prompt: list[int], replayed: int, max_tokens: int, scored: bool, shared: bool, lives: list[Any]
) -> None:
    seen = continuation(prompt, replayed, seed=3, vocab_size=VOCAB)
    response = common_pb2.ResponseOptions(prompt_logprobs=0 if scored and not replayed else None)
    given_spec = spec([*prompt, *seen], max_tokens, response=response)
    if replayed:
        given_spec.prompt_len = len(prompt)
    whole = Engine(given_spec)
    expected = (list(whole.tokens), list(whole.scores))
    first = Resumable(given_spec, POLICY)
    second = spec([*prompt, *seen], max_tokens, response=response)
    second.prompt_len = len(prompt)
    sequence = Resumable(second, POLICY, like=first) if shared else first
    assert list(second.token_ids) == ([] if shared else [*prompt, *seen])
    reader, now = Reader(sequence), 0.0
    for tokens, scores, failure in lives:
        if not failure.refused and reader.read(Engine(sequence.spec()), tokens, scores):
            # Its last token was told: whatever happens now, nothing may be generated.
            verdict = sequence.after(failure, now)
            assert isinstance(verdict, Finished)
            assert verdict.end.reason == LENGTH
            usage = verdict.end.usage
            break
        verdict = sequence.after(failure, now)
        if isinstance(verdict, GivenUp):
            return
        assert isinstance(verdict, Again)
        now += verdict.delay_s
        assert now <= verdict.until
    else:
        engine = Engine(sequence.spec())
        assert reader.read(engine, len(engine.tokens), 9)
        usage = common_pb2.Usage(prompt_tokens=len(prompt), completion_tokens=replayed + len(reader.tokens))
    assert (reader.tokens, reader.scores) == expected
    assert usage.completion_tokens == max_tokens
    assert usage.prompt_tokens == len(prompt)


EVENTS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([failed(LOST), failed(DRAINING), Failure.router_lost()])),
    min_size=40,
    max_size=40,
)


@settings(deadline=None, max_examples=50)
@given(events=EVENTS, attempts=st.integers(1, 9), lives=st.integers(1, 30))
def test_nobody_is_tried_for_ever(events: list[Any], attempts: int, lives: int) -> None:
    sequence = Resumable(spec([1], 100_000), ResumePolicy(max_attempts=attempts, max_lives=lives))
    barren = deaths = 0
    for number, (tokens, failure) in enumerate(events, 1):
        sequence.record([7] * tokens)
        alone = sequence.alone
        verdict = sequence.after(failure, float(number))
        barren, deaths = (0, 0) if tokens else (barren + 1, deaths + (failure.cause is Cause.ENGINE_LOST))
        if isinstance(verdict, GivenUp):
            guilty = alone and not tokens and failure.cause is Cause.ENGINE_LOST
            assert guilty or barren == attempts or number == lives
            assert (verdict.error == POISONED) == guilty
            return
        assert isinstance(verdict, Again)
        assert sequence.alone == (deaths >= 2)
    raise AssertionError("it was tried for ever")


def verdicts(*failures: Failure, sequence: Resumable | None = None) -> list[Verdict]:
    sequence = sequence or Resumable(spec([1, 2]), POLICY)
    return [sequence.after(failure, float(second)) for second, failure in enumerate(failures)]


@pytest.mark.parametrize(
    "told",
    [
        error(common_pb2.ERROR_CODE_INVALID_ARGUMENT, retryable=False),
        error(common_pb2.ERROR_CODE_TIMEOUT),
        error(common_pb2.ERROR_CODE_UNAVAILABLE, retryable=False),
        POISONED,
    ],
)
@pytest.mark.parametrize("make", [failed, Failure.of_refusal])
def test_what_repeating_does_not_mend_is_passed_on(told: common_pb2.Error, make: Any) -> None:
    assert verdicts(make(told)) == [Passed(told)]


def test_a_full_queue_is_told_of_but_not_to_who_had_a_place() -> None:
    assert verdicts(Failure.of_refusal(FULL)) == [Passed(FULL)]
    first, second = verdicts(Failure.router_lost(), Failure.of_refusal(FULL))
    assert isinstance(first, Again)
    assert isinstance(second, Again)


BROKEN = error(common_pb2.ERROR_CODE_INTERNAL)


@pytest.mark.parametrize(
    "lost",
    [
        failed(LOST),
        failed(DRAINING),
        failed(BROKEN),
        Failure.router_lost(),
        # It waited in a router that ends.
        Failure.of_refusal(DRAINING),
    ],
)
def test_what_had_a_place_is_no_newcomer(lost: Failure) -> None:
    sequence = Resumable(spec([1, 2], max_wait_ms=0), POLICY)
    assert not sequence.resumed
    assert sequence.spec().max_wait_ms == 0
    assert isinstance(sequence.after(lost, 0.0), Again)
    assert sequence.resumed
    # Its client waits for as long as it takes.
    assert not sequence.spec().HasField("max_wait_ms")
    assert isinstance(sequence.after(Failure.of_refusal(FULL), 1.0), Again)
    sequence.record([7])
    assert not sequence.spec().HasField("max_wait_ms")


def test_who_was_never_let_in_stays_a_newcomer() -> None:
    sequence = Resumable(spec([1, 2], max_wait_ms=500), POLICY)
    assert isinstance(sequence.after(Failure.of_refusal(AWAY), 0.0), Again)
    assert (sequence.resumed, sequence.spec().max_wait_ms) == (False, 500)


def test_a_router_that_drains_says_nothing_of_when_others_have_room() -> None:
    told = error(common_pb2.ERROR_CODE_DRAINING, retry_after_ms=1000)
    (verdict,) = verdicts(Failure.of_refusal(told))
    assert isinstance(verdict, Again)
    assert verdict.delay_s <= POLICY.first_delay_s


def test_a_failed_step_is_tried_once_more() -> None:
    broken = failed(BROKEN)
    first, second = verdicts(broken, broken)
    assert isinstance(first, Again)
    assert second == GivenUp(Cause.ENGINE_FAILED, broken.error)


def test_retry_after_is_respected_and_waiting_ends() -> None:
    sequence = Resumable(spec([1]), ResumePolicy(wait_s=1.0))
    for now in (0.0, 0.3, 0.6):
        verdict = sequence.after(Failure.of_refusal(AWAY), now)
        assert isinstance(verdict, Again)
        assert verdict.delay_s >= 0.3
        assert verdict.until == 1.0
    assert sequence.after(Failure.of_refusal(AWAY), 0.9) == GivenUp(Cause.UNAVAILABLE, AWAY)


def test_pauses_grow_and_are_drawn_within_bounds() -> None:
    sequence = Resumable(spec([1]), ResumePolicy(max_attempts=99, first_delay_s=0.1, longest_delay_s=0.8))
    delays = [
        v.delay_s for v in verdicts(*[Failure.router_lost()] * 8, sequence=sequence) if isinstance(v, Again)
    ]
    for delay, most in zip(delays, (0.1, 0.2, 0.4, *[0.8] * 5), strict=True):
        assert most / 2 <= delay <= most


def test_two_deaths_then_alone_then_guilty() -> None:
    sequence = Resumable(spec([1]), POLICY)
    seen = [
        (isinstance(sequence.after(failed(LOST), n), Again), sequence.alone, sequence.resumed)
        for n in range(2)
    ]
    assert seen == [(True, False, True), (True, True, True)]
    assert isinstance(sequence.after(Failure.router_lost(), 3.0), Again)
    assert sequence.alone
    assert sequence.after(failed(LOST), 4.0) == GivenUp(Cause.ENGINE_LOST, POISONED)


def test_a_token_proves_innocence() -> None:
    sequence = Resumable(spec([1]), POLICY)
    for now in range(8):
        if sequence.alone:
            sequence.record([5])
        assert isinstance(sequence.after(failed(LOST), now), Again)
    assert sequence.emitted == 2


@pytest.mark.parametrize(
    ("stopping", "last", "reason"),
    [
        ({"stop_token_ids": [9]}, 9, STOP),
        ({}, 2, STOP),
        ({"ignore_eos": True}, 2, None),
        ({"stop_token_ids": [9], "min_tokens": 5}, 9, None),
    ],
)
def test_an_end_that_was_lost_after_its_token(stopping: Any, last: int, reason: int | None) -> None:
    sequence = Resumable(spec([1], stopping=stopping), POLICY, eos_token_ids=(2,))
    sequence.record([4, last])
    verdict = sequence.after(Failure.router_lost(), 0.0)
    if reason is None:
        assert isinstance(verdict, Again)
        return
    assert isinstance(verdict, Finished)
    assert (verdict.end.reason, verdict.end.stop_token_id) == (reason, last)
    assert verdict.end.usage.completion_tokens == 2


def test_to_the_end_of_the_context() -> None:
    sequence = Resumable(spec([1], None), POLICY)
    refusal = Failure.of_refusal(error(common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED, retryable=False))
    assert isinstance(sequence.after(refusal, 0.0), Passed)
    sequence.record([4, 5])
    assert isinstance(sequence.after(Failure.router_lost(), 0.0), Again)
    verdict = sequence.after(refusal, 0.0)
    assert isinstance(verdict, Finished)
    assert verdict.end.reason == LENGTH


@pytest.mark.parametrize("told", [False, True])
def test_cached_tokens_are_those_of_the_life_with_the_first_token(told: bool) -> None:
    sequence = Resumable(spec([1, 2]), POLICY)
    usage = common_pb2.Usage(prompt_tokens=2, cached_tokens=2, completion_tokens=9)
    assert isinstance(sequence.after(failed(LOST, cached_tokens=2), 0.0), Again)
    sequence.settle(usage)
    assert usage.cached_tokens == 2
    sequence.record([4])
    lost = failed(DRAINING, cached_tokens=1) if told else Failure.router_lost()
    assert isinstance(sequence.after(lost, 0.0), Again)
    sequence.settle(usage)
    assert (usage.cached_tokens, usage.completion_tokens) == (1 if told else 0, 9)


def test_a_missing_seed_is_drawn_once() -> None:
    given_spec = spec([1])
    given_spec.sampling.ClearField("seed")
    sequence = Resumable(given_spec, POLICY)
    seed = sequence.spec().sampling.seed
    sequence.record([4])
    sequence.after(Failure.router_lost(), 0.0)
    again = sequence.spec()
    assert (again.sampling.seed, list(again.token_ids), again.prompt_len) == (seed, [1, 4], 1)
    pooled = common_pb2.SequenceSpec(model="m", token_ids=[1], pooling=common_pb2.Pooling())
    assert not Resumable(pooled, POLICY).spec().HasField("sampling")
