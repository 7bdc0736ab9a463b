"""Limits, the guard that always gives back, and the checks of a request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary.v1 import common_pb2, engine_pb2
from services.router.admission import Admission, AdmissionLimits, Refused, SpecLimits, validate
from services.router.fleet import Engine


def engine(name: str) -> Engine:
    return Engine(
        instance_id=name,
        name=name,
        version="",
        device="",
        model=common_pb2.ModelInfo(),
        capacity=engine_pb2.Capacity(),
        epoch=1,
        state=engine_pb2.ENGINE_STATE_SERVING,
        last_heard=0.0,
    )


def admission(sequences: int = 100, tokens: int = 10_000) -> Admission:
    return Admission(AdmissionLimits(sequences, tokens, retry_after_ms=250))


def refusal_of(call, *args) -> common_pb2.Error:
    with pytest.raises(Refused) as caught:
        call(*args)
    return caught.value.error


def test_limits_are_exact_and_name_their_option():
    full = admission(sequences=2)
    guards = [full.admit(1), full.admit(1)]
    error = refusal_of(full.admit, 1)
    assert error.code == common_pb2.ERROR_CODE_OVERLOADED
    assert error.retry_after_ms == 250
    assert "2 live sequences (max-live-sequences)" in error.message
    guards[0].release()
    full.admit(1)
    heavy = admission(tokens=10)
    heavy.admit(10)
    assert "10 live prompt tokens (max-live-tokens)" in refusal_of(heavy.admit, 1).message


def test_nothing_is_admitted_while_draining():
    draining = admission()
    draining.drain()
    error = refusal_of(draining.admit, 1)
    assert error.code == common_pb2.ERROR_CODE_DRAINING
    assert error.retryable
    assert draining.live_sequences == 0


@given(
    st.lists(
        st.tuples(
            st.integers(0, 9), st.sampled_from(["admit", "place a", "place b", "prefilled", "release"])
        ),
        max_size=60,
    )
)
def test_any_interleaving_counts_exactly_and_returns_to_zero(events):
    ledger = admission()
    engines = {"a": engine("a"), "b": engine("b")}
    guards, model, to_compute = {}, {}, {}
    for key, what in events:
        if what == "admit" and key not in guards:
            guards[key] = ledger.admit(key)
            model[key] = None
        elif key in guards and what == "release":
            guards[key].release()
            model.pop(key, None)
        elif key in guards and what.startswith("place"):
            guards[key].place(engines[what[-1]], 2 * key)
            if key in model:
                model[key] = what[-1]
                to_compute[key] = 2 * key
        elif key in guards and what == "prefilled":
            guards[key].prefilled()
            to_compute[key] = 0
        assert ledger.live_sequences == len(model)
        assert ledger.live_tokens == sum(model)
        for name, placed in engines.items():
            mine = [key for key, where in model.items() if where == name]
            assert (placed.placed_sequences, placed.placed_tokens) == (len(mine), sum(mine))
            assert placed.placed_prefill == sum(to_compute[key] for key in mine)
    for guard in guards.values():
        guard.release()
        guard.release()
    counts = [(e.placed_sequences, e.placed_tokens, e.placed_prefill) for e in engines.values()]
    assert (ledger.live_sequences, ledger.live_tokens, *counts) == (0, 0, (0, 0, 0), (0, 0, 0))


GOOD = {"model": "m", "token_ids": [1, 2, 3]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": ""}, "model"),
        ({"model": "x" * 257}, "model"),
        ({"token_ids": []}, "prompt"),
        ({"token_ids": [1] * 11}, "prompt"),
        ({"prompt_len": 0}, "prompt_len"),
        ({"prompt_len": 4}, "prompt_len"),
        ({"request_id": "a b"}, "request_id"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"traceparent": "x" * 129}, "traceparent"),
        ({"stopping": {"stop_token_ids": range(1025)}}, "stop_token_ids"),
        ({"response": {"top_logprobs": 21}}, "top_logprobs"),
        ({"response": {"prompt_logprobs": 21}}, "prompt_logprobs"),
        ({"cache_salt": "x" * 129}, "cache_salt"),
        ({"constraint": {"kind": 2, "source": "é" * 65_537}}, "constraint"),
        ({"constraint": {"kind": 2, "source": "a", "after": "x" * 257}}, "constraint"),
        ({"sampling": {"logit_bias": [{}] * (2**19 + 1)}}, "logit_bias"),
        ({"sampling": {"bad_words": [{"token_ids": range(2**19)}]}}, "bad_words"),
        ({"sampling": {"bad_words": [{}] * (2**19 + 1)}}, "bad_words"),
        ({"sampling": {"allowed_token_ids": range(2**19 + 1)}}, "allowed_token_ids"),
    ],
)
def test_what_could_hurt_is_refused_by_name(fields, param):
    error = refusal_of(validate, common_pb2.SequenceSpec(**{**GOOD, **fields}), SpecLimits(10))
    assert error.param == param
    assert not error.retryable


def test_what_is_well_formed_passes():
    for fields in (
        {},
        {"prompt_len": 3},
        {"request_id": "seq-1"},
        {"response": {"top_logprobs": 20, "prompt_logprobs": 20}},
        {"cache_salt": "x" * 128, "priority": -5},
        {"constraint": {"kind": 2, "source": "é" * 65_536, "after": "é" * 256}},
        {"sampling": {"allowed_token_ids": range(2**19)}},
    ):
        validate(common_pb2.SequenceSpec(**{**GOOD, **fields}), SpecLimits(10))
