"""A sequence through any schedule of failures: the same stream, the same counts, and an end to trying."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from catenary.resume import POISONED, Cause, Failure, Finished, GivenUp, Resumable, ResumePolicy, Retry
from catenary.v1 import common_pb2
from catenary_testing.engine import continuation
from tests.support.resumable import AWAY, DRAINING, LENGTH, LOST, POLICY, error, failed, spec

VOCAB = 500


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
        assert isinstance(verdict, Retry)
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
    sequence = Resumable(spec([1], 100_000), ResumePolicy(fruitless_attempts=attempts, total_attempts=lives))
    barren = deaths = 0
    for number, (tokens, failure) in enumerate(events, 1):
        sequence.record([7] * tokens)
        alone = sequence.quarantined
        verdict = sequence.after(failure, float(number))
        barren, deaths = (0, 0) if tokens else (barren + 1, deaths + (failure.cause is Cause.ENGINE_LOST))
        if isinstance(verdict, GivenUp):
            guilty = alone and not tokens and failure.cause is Cause.ENGINE_LOST
            assert guilty or barren == attempts or number == lives
            assert (verdict.error == POISONED) == guilty
            return
        assert isinstance(verdict, Retry)
        assert sequence.quarantined == (deaths >= 2)
    raise AssertionError("it was tried for ever")
