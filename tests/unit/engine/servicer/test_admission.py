"""Admission: what is refused, with which code and parameter, and what is filled in."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary.v1 import common_pb2
from services.engine.domain import SamplingOptions
from services.engine.link import CapacityFacts, ModelFacts
from services.engine.servicer import Admission, SequenceLimits
from services.engine.servicer.admission import Inadmissible
from tests.support.specs import sequence_spec

MODEL = ModelFacts(
    max_model_len=100, vocab_size=1000, eos_token_ids=[2], dtype="float32", tokenizer_sha256=""
)
CAPACITY = CapacityFacts(block_size=16, total_blocks=64, max_running=4, max_waiting=4, max_batched_tokens=64)
ADMISSION = Admission("scripted", MODEL, CAPACITY, SequenceLimits(4, 3, 2, 3))
INVALID = common_pb2.ERROR_CODE_INVALID_ARGUMENT
TOO_LONG = common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED


def bias(token: int, value: float) -> common_pb2.LogitBias:
    return common_pb2.LogitBias(token_id=token, bias=value)


def word(*token_ids: int) -> common_pb2.TokenSequence:
    return common_pb2.TokenSequence(token_ids=token_ids)


REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    ("empty prompt", {"token_ids": []}, INVALID, "prompt"),
    ("id at the vocabulary size", {"token_ids": [1, 1000]}, INVALID, "prompt"),
    ("prompt_len 0", {"prompt_len": 0}, INVALID, "prompt_len"),
    ("prompt_len beyond", {"prompt_len": 4}, INVALID, "prompt_len"),
    ("prompt fills the context", {"token_ids": [1] * 100}, TOO_LONG, "prompt"),
    ("max_tokens 0", {"max_tokens": 0}, INVALID, "max_tokens"),
    ("max_tokens one too many", {"max_tokens": 98}, TOO_LONG, "max_tokens"),
    ("max_tokens huge", {"max_tokens": 2**32 - 1}, TOO_LONG, "max_tokens"),
    ("all tokens emitted", {"prompt_len": 1, "max_tokens": 2}, INVALID, "max_tokens"),
    ("min above max", {"max_tokens": 8, "min_tokens": 9}, INVALID, "min_tokens"),
    ("min above the context", {"max_tokens": None, "min_tokens": 98}, INVALID, "min_tokens"),
    ("temperature NaN", {"temperature": math.nan}, INVALID, "temperature"),
    ("temperature infinite", {"temperature": math.inf}, INVALID, "temperature"),
    ("temperature -1", {"temperature": -1}, INVALID, "temperature"),
    ("top_p 0", {"top_p": 0}, INVALID, "top_p"),
    ("top_p 1.1", {"top_p": 1.1}, INVALID, "top_p"),
    ("top_p NaN", {"top_p": math.nan}, INVALID, "top_p"),
    ("top_k -2", {"top_k": -2}, INVALID, "top_k"),
    ("stop id at the vocabulary size", {"stop_token_ids": [1000]}, INVALID, "stop_token_ids"),
    ("too many stop ids", {"stop_token_ids": [1, 2, 3, 4, 5]}, INVALID, "stop_token_ids"),
    ("top_logprobs 21", {"top_logprobs": 21}, INVALID, "top_logprobs"),
    ("prompt_logprobs 21", {"prompt_logprobs": 21}, INVALID, "prompt_logprobs"),
    ("min_p NaN", {"min_p": math.nan}, INVALID, "min_p"),
    ("min_p -0.1", {"min_p": -0.1}, INVALID, "min_p"),
    ("min_p 1.1", {"min_p": 1.1}, INVALID, "min_p"),
    ("presence_penalty 2.1", {"presence_penalty": 2.1}, INVALID, "presence_penalty"),
    ("presence_penalty NaN", {"presence_penalty": math.nan}, INVALID, "presence_penalty"),
    ("frequency_penalty -3", {"frequency_penalty": -3}, INVALID, "frequency_penalty"),
    ("frequency_penalty infinite", {"frequency_penalty": math.inf}, INVALID, "frequency_penalty"),
    ("repetition_penalty 0", {"repetition_penalty": 0}, INVALID, "repetition_penalty"),
    ("repetition_penalty -1", {"repetition_penalty": -1}, INVALID, "repetition_penalty"),
    ("repetition_penalty tiny", {"repetition_penalty": 1e-30}, INVALID, "repetition_penalty"),
    ("repetition_penalty infinite", {"repetition_penalty": math.inf}, INVALID, "repetition_penalty"),
    ("repetition_penalty NaN", {"repetition_penalty": math.nan}, INVALID, "repetition_penalty"),
    ("bias of an id too large", {"logit_bias": [bias(1000, 1)]}, INVALID, "logit_bias"),
    ("bias 100.1", {"logit_bias": [bias(1, 100.1)]}, INVALID, "logit_bias"),
    ("bias NaN", {"logit_bias": [bias(1, math.nan)]}, INVALID, "logit_bias"),
    ("bias infinite", {"logit_bias": [bias(1, -math.inf)]}, INVALID, "logit_bias"),
    ("two biases", {"logit_bias": [bias(1, 1), bias(1, 1)]}, INVALID, "logit_bias"),
    ("too many biases", {"logit_bias": [bias(i, 1) for i in range(4)]}, INVALID, "logit_bias"),
    ("bad word of an id too large", {"bad_words": [word(1, 1000)]}, INVALID, "bad_words"),
    ("empty bad word", {"bad_words": [word()]}, INVALID, "bad_words"),
    ("long bad word", {"bad_words": [word(1, 2, 3, 4)]}, INVALID, "bad_words"),
    ("too many bad words", {"bad_words": [word(1)] * 3}, INVALID, "bad_words"),
    ("allowed id too large", {"allowed_token_ids": [4, 1000]}, INVALID, "allowed_token_ids"),
    ("cache_salt of 129", {"cache_salt": "é" * 129}, INVALID, "cache_salt"),
    ("another model", {"model": "gpt"}, common_pb2.ERROR_CODE_MODEL_NOT_FOUND, "model"),
]


@pytest.mark.parametrize(("fields", "code", "param"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_refusals_name_code_and_parameter(fields: dict[str, Any], code: Any, param: str) -> None:
    spec = sequence_spec(**{"token_ids": [1, 2, 3], **fields})
    with pytest.raises(Inadmissible) as caught:
        ADMISSION.resolve(spec, 1)
    error = caught.value.error
    assert (error.code, error.param, error.retryable) == (code, param, False)
    assert error.message.endswith(".")


def test_a_long_request_id_is_refused() -> None:
    spec = sequence_spec([1])
    spec.request_id = "x" * 257
    with pytest.raises(Inadmissible) as caught:
        ADMISSION.resolve(spec, 1)
    assert caught.value.error.param == "request_id"


def test_a_context_refusal_gives_both_numbers() -> None:
    with pytest.raises(Inadmissible, match=r"3 tokens and max_tokens is 98.*100 tokens"):
        ADMISSION.resolve(sequence_spec([1, 2, 3], max_tokens=98), 1)
    with pytest.raises(Inadmissible, match=r"150 tokens; the longest sequence here is 100 tokens"):
        ADMISSION.resolve(sequence_spec([1] * 150), 1)


def test_a_sequence_longer_than_the_kv_pool_is_refused() -> None:
    small = CapacityFacts(block_size=16, total_blocks=2, max_running=4, max_waiting=4, max_batched_tokens=64)
    admission = Admission("scripted", MODEL, small, SequenceLimits(4, 3, 2, 3))
    assert admission.resolve(sequence_spec([1] * 16, max_tokens=16), 1).max_tokens == 16
    assert admission.resolve(sequence_spec([1] * 16, max_tokens=None), 1).max_tokens == 16
    for spec in (sequence_spec([1] * 16, max_tokens=17), sequence_spec([1] * 32)):
        with pytest.raises(Inadmissible, match="32 tokens") as caught:
            admission.resolve(spec, 1)
        assert caught.value.error.code == TOO_LONG


def test_absent_fields_take_the_models_defaults() -> None:
    model = ModelFacts(
        max_model_len=100,
        vocab_size=1000,
        eos_token_ids=[2],
        dtype="float32",
        tokenizer_sha256="",
        sampling_defaults={
            "temperature": 0.25,
            "top_p": 0.5,
            "top_k": 40,
            "min_p": 0.25,
            "repetition_penalty": 1.5,
        },
    )
    spec = common_pb2.SequenceSpec(request_id="r", model="scripted", token_ids=[1, 2, 3])
    resolved = Admission("scripted", model, CAPACITY, SequenceLimits()).resolve(spec, 9)
    assert (resolved.key, resolved.prompt_len) == (9, 3)
    chosen = resolved.sampling
    assert (chosen.temperature, chosen.top_p, chosen.top_k) == (0.25, 0.5, 40)
    assert (resolved.max_tokens, resolved.min_tokens, chosen.top_logprobs) == (97, 0, -1)
    assert not resolved.ignore_eos
    assert (chosen.min_p, chosen.repetition_penalty, chosen.keep_top_k_duplicates) == (0.25, 1.5, True)
    assert (resolved.priority, resolved.cache_salt) == (0, "")
    plain = ADMISSION.resolve(spec, 9).sampling
    assert plain == SamplingOptions(seed=plain.seed)
    assert (plain.temperature, plain.top_p, plain.top_k) == (1.0, 1.0, 0)
    assert plain.seed != ADMISSION.resolve(spec, 9).sampling.seed


def test_given_fields_win_over_the_models_defaults() -> None:
    spec = sequence_spec([1, 2, 3], temperature=0, top_p=1, top_k=-1, top_logprobs=0, stop_token_ids=[7, 7])
    resolved = ADMISSION.resolve(spec, 1)
    chosen = resolved.sampling
    assert (chosen.temperature, chosen.top_p, chosen.top_k) == (0, 1, 0)
    assert (chosen.top_logprobs, resolved.stop_token_ids, chosen.seed) == (0, [7], 7)


def test_every_option_reaches_the_core() -> None:
    spec = sequence_spec(
        [1, 2, 3],
        temperature=0.5,
        top_p=0.25,
        top_k=9,
        keep_top_k_duplicates=False,
        min_p=0.125,
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=1.5,
        logit_bias=[bias(999, -100), bias(0, 100)],
        bad_words=[word(1), word(4, 5, 6)],
        allowed_token_ids=[7, 8, 7],
        top_logprobs=0,
        prompt_logprobs=20,
        priority=-4,
        cache_salt="tenant",
    )
    resolved = ADMISSION.resolve(spec, 1)
    assert (resolved.priority, resolved.cache_salt) == (-4, "tenant")
    assert resolved.sampling == SamplingOptions(
        temperature=0.5,
        top_p=0.25,
        top_k=9,
        seed=7,
        top_logprobs=0,
        min_p=0.125,
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=1.5,
        logit_bias=((999, -100), (0, 100)),
        bad_words=((1,), (4, 5, 6)),
        allowed_token_ids=(7, 8),
        prompt_logprobs=20,
        keep_top_k_duplicates=False,
    )


@pytest.mark.parametrize("value", [0.01, 100.0])
def test_the_ends_of_the_range_of_the_repetition_penalty(value: float) -> None:
    resolved = ADMISSION.resolve(sequence_spec([1], repetition_penalty=value), 1)
    assert resolved.sampling.repetition_penalty == pytest.approx(value)


@given(
    total=st.integers(0, 130),
    prompt_len=st.none() | st.integers(0, 140),
    max_tokens=st.none() | st.integers(0, 2**32 - 1) | st.integers(1, 100),
    min_tokens=st.none() | st.integers(0, 110),
)
def test_what_is_admitted_always_fits(
    total: int, prompt_len: int | None, max_tokens: int | None, min_tokens: int | None
) -> None:
    spec = sequence_spec([5] * total, prompt_len=prompt_len, max_tokens=max_tokens, min_tokens=min_tokens)
    try:
        resolved = ADMISSION.resolve(spec, 1)
    except Inadmissible:
        return
    assert 1 <= resolved.prompt_len <= total
    assert total - resolved.prompt_len < resolved.max_tokens
    assert resolved.prompt_len + resolved.max_tokens <= 100
    assert resolved.min_tokens <= resolved.max_tokens


@pytest.mark.parametrize(
    "constraint",
    [
        {"kind": 0, "source": "a"},
        {"kind": 99, "source": "a"},
        {"kind": 2, "source": ""},
        {"kind": 2, "source": "é" * 65_537},
        {"kind": 2, "source": "a", "after": ""},
        {"kind": 2, "source": "a", "after": "x" * 257},
    ],
)
def test_a_constraint_of_no_shape_is_refused(constraint: dict[str, Any]) -> None:
    spec = sequence_spec([1, 2, 3])
    spec.constraint.CopyFrom(common_pb2.Constraint(**constraint))
    with pytest.raises(Inadmissible) as caught:
        ADMISSION.resolve(spec, 1)
    assert (caught.value.error.code, caught.value.error.param) == (INVALID, "constraint")


def test_a_constraint_comes_through() -> None:
    spec = sequence_spec([1, 2, 3])
    spec.constraint.CopyFrom(
        common_pb2.Constraint(kind=common_pb2.CONSTRAINT_KIND_REGEX, source="a+", after="</think>")
    )
    found = ADMISSION.resolve(spec, 1).constraint
    assert found is not None
    assert (found.kind, found.source, found.after) == (2, "a+", "</think>")
