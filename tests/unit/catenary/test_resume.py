"""What is tried again after which failure, how often, and with what."""

from __future__ import annotations

from typing import Any

import pytest

from catenary.resume import (
    POISONED,
    Cause,
    Failure,
    Finished,
    GivenUp,
    NotRetried,
    Resumable,
    ResumePolicy,
    Retry,
    Verdict,
)
from catenary.v1 import common_pb2
from tests.support.resumable import AWAY, DRAINING, FULL, LENGTH, LOST, POLICY, STOP, error, failed, spec


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
    assert verdicts(make(told)) == [NotRetried(told)]


def test_a_full_queue_is_told_of_but_not_to_who_had_a_place() -> None:
    assert verdicts(Failure.of_refusal(FULL)) == [NotRetried(FULL)]
    first, second = verdicts(Failure.router_lost(), Failure.of_refusal(FULL))
    assert isinstance(first, Retry)
    assert isinstance(second, Retry)


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
    assert isinstance(sequence.after(lost, 0.0), Retry)
    assert sequence.resumed
    # Its client waits for as long as it takes.
    assert not sequence.spec().HasField("max_wait_ms")
    assert isinstance(sequence.after(Failure.of_refusal(FULL), 1.0), Retry)
    sequence.record([7])
    assert not sequence.spec().HasField("max_wait_ms")


def test_who_was_never_let_in_stays_a_newcomer() -> None:
    sequence = Resumable(spec([1, 2], max_wait_ms=500), POLICY)
    assert isinstance(sequence.after(Failure.of_refusal(AWAY), 0.0), Retry)
    assert (sequence.resumed, sequence.spec().max_wait_ms) == (False, 500)


def test_a_router_that_drains_says_nothing_of_when_others_have_room() -> None:
    told = error(common_pb2.ERROR_CODE_DRAINING, retry_after_ms=1000)
    (verdict,) = verdicts(Failure.of_refusal(told))
    assert isinstance(verdict, Retry)
    assert verdict.delay_s <= POLICY.first_delay_s


def test_a_failed_step_is_tried_once_more() -> None:
    broken = failed(BROKEN)
    first, second = verdicts(broken, broken)
    assert isinstance(first, Retry)
    assert second == GivenUp(Cause.ENGINE_FAILED, broken.error)


def test_retry_after_is_respected_and_waiting_ends() -> None:
    sequence = Resumable(spec([1]), ResumePolicy(wait_s=1.0))
    for now in (0.0, 0.3, 0.6):
        verdict = sequence.after(Failure.of_refusal(AWAY), now)
        assert isinstance(verdict, Retry)
        assert verdict.delay_s >= 0.3
        assert verdict.until == 1.0
    assert sequence.after(Failure.of_refusal(AWAY), 0.9) == GivenUp(Cause.UNAVAILABLE, AWAY)


def test_pauses_grow_and_are_drawn_within_bounds() -> None:
    sequence = Resumable(
        spec([1]), ResumePolicy(fruitless_attempts=99, first_delay_s=0.1, longest_delay_s=0.8)
    )
    delays = [
        v.delay_s for v in verdicts(*[Failure.router_lost()] * 8, sequence=sequence) if isinstance(v, Retry)
    ]
    for delay, most in zip(delays, (0.1, 0.2, 0.4, *[0.8] * 5), strict=True):
        assert most / 2 <= delay <= most


def test_two_deaths_then_alone_then_guilty() -> None:
    sequence = Resumable(spec([1]), POLICY)
    seen = [
        (isinstance(sequence.after(failed(LOST), n), Retry), sequence.quarantined, sequence.resumed)
        for n in range(2)
    ]
    assert seen == [(True, False, True), (True, True, True)]
    assert isinstance(sequence.after(Failure.router_lost(), 3.0), Retry)
    assert sequence.quarantined
    assert sequence.after(failed(LOST), 4.0) == GivenUp(Cause.ENGINE_LOST, POISONED)


def test_a_token_proves_innocence() -> None:
    sequence = Resumable(spec([1]), POLICY)
    for now in range(8):
        if sequence.quarantined:
            sequence.record([5])
        assert isinstance(sequence.after(failed(LOST), now), Retry)
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
        assert isinstance(verdict, Retry)
        return
    assert isinstance(verdict, Finished)
    assert (verdict.end.reason, verdict.end.stop_token_id) == (reason, last)
    assert verdict.end.usage.completion_tokens == 2


def test_to_the_end_of_the_context() -> None:
    sequence = Resumable(spec([1], None), POLICY)
    refusal = Failure.of_refusal(error(common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED, retryable=False))
    assert isinstance(sequence.after(refusal, 0.0), NotRetried)
    sequence.record([4, 5])
    assert isinstance(sequence.after(Failure.router_lost(), 0.0), Retry)
    verdict = sequence.after(refusal, 0.0)
    assert isinstance(verdict, Finished)
    assert verdict.end.reason == LENGTH


@pytest.mark.parametrize("told", [False, True])
def test_cached_tokens_are_those_of_the_life_with_the_first_token(told: bool) -> None:
    sequence = Resumable(spec([1, 2]), POLICY)
    usage = common_pb2.Usage(prompt_tokens=2, cached_tokens=2, completion_tokens=9)
    assert isinstance(sequence.after(failed(LOST, cached_tokens=2), 0.0), Retry)
    sequence.settle(usage)
    assert usage.cached_tokens == 2
    sequence.record([4])
    lost = failed(DRAINING, cached_tokens=1) if told else Failure.router_lost()
    assert isinstance(sequence.after(lost, 0.0), Retry)
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
