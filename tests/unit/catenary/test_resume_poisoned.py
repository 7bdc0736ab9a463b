"""What is remembered of requests that killed engines."""

from __future__ import annotations

from typing import Any

import pytest

from catenary.resume import PoisonedRequests, fingerprint
from catenary.v1 import common_pb2


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def spec(prompt: list[int], *, seed: int = 1, **fields: Any) -> common_pb2.SequenceSpec:
    sampling = common_pb2.SamplingParams(seed=seed, temperature=fields.pop("temperature", 0.5))
    return common_pb2.SequenceSpec(model="m", token_ids=prompt, sampling=sampling, **fields)


def test_another_life_seed_or_owner_is_the_same_request() -> None:
    one = fingerprint(spec([1, 2]))
    logprobs = common_pb2.ResponseOptions(top_logprobs=3)
    for other in (
        spec([1, 2], seed=9),
        spec([1, 2, 7, 8], prompt_len=2),
        spec([1, 2], request_id="x", tenant="t", cache_salt="s", priority=3, response=logprobs),
    ):
        assert fingerprint(other) == one


@pytest.mark.parametrize(
    "other",
    [
        spec([1, 3]),
        spec([1]),
        spec([1, 2, 7]),
        spec([1, 2], temperature=0.6),
        spec([1, 2], stopping=common_pb2.StoppingParams(max_tokens=4)),
        spec([1, 2], constraint=common_pb2.Constraint(source="a")),
        spec([1, 2], beam_search=common_pb2.BeamSearch(width=2)),
        spec([1, 2], pooling=common_pb2.Pooling()),
    ],
)
def test_other_prompts_and_parameters_are_others(other: common_pb2.SequenceSpec) -> None:
    assert fingerprint(other) != fingerprint(spec([1, 2]))


def test_they_are_forgotten_after_a_time() -> None:
    clock = Clock()
    book = PoisonedRequests(limit=9, ttl_s=10, clock=clock)
    book.add(spec([1]))
    clock.now = 5
    book.add(spec([2]))
    clock.now = 9.9
    assert spec([1]) in book
    clock.now = 10
    assert (spec([1]) in book, spec([2]) in book, len(book)) == (False, True, 1)
    book.add(spec([2]))
    clock.now = 19
    assert spec([2]) in book


def test_no_more_than_the_limit_are_held() -> None:
    book = PoisonedRequests(limit=3, ttl_s=10, clock=Clock())
    for token in range(50):
        book.add(spec([token]))
    assert len(book) == 3
    assert [spec([token]) in book for token in (46, 47, 48, 49)] == [False, True, True, True]
