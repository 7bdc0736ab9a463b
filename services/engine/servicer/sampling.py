"""Admission of sampling parameters: each field checked, each default filled in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from catenary.parameters import BIAS, MIN_P, PENALTY, REPETITION, TEMPERATURE, TOP_K, TOP_P
from catenary.schema import MAX_TOP_LOGPROBS
from catenary.seeds import draw_seed
from catenary.v1 import common_pb2
from services.engine.domain import SamplingOptions
from services.engine.link import ModelFacts
from services.engine.servicer.inadmissible import Inadmissible


@dataclass(frozen=True, slots=True)
class SequenceLimits:
    """How much a sequence may bring besides its prompt."""

    max_stop_token_ids: int = 64
    max_logit_bias: int = 1024
    max_bad_words: int = 256
    max_bad_word_tokens: int = 32
    max_beam_width: int = 8
    max_beam_numbers: int = 1 << 20


def resolve_sampling(
    spec: common_pb2.SequenceSpec, model: ModelFacts, limits: SequenceLimits
) -> SamplingOptions:
    """The sequence's sampling options. Draws a seed if it has none. Raises Inadmissible."""
    given, response = spec.sampling, spec.response
    return SamplingOptions(
        temperature=_temperature(given, model),
        top_p=_top_p(given, model),
        top_k=_top_k(given, model),
        seed=given.seed if given.HasField("seed") else draw_seed(),
        top_logprobs=_alternatives(response, "top_logprobs"),
        min_p=_min_p(given, model),
        presence_penalty=_penalty(given, "presence_penalty"),
        frequency_penalty=_penalty(given, "frequency_penalty"),
        repetition_penalty=_repetition_penalty(given, model),
        logit_bias=_logit_bias(given, model, limits),
        bad_words=_bad_words(given, model, limits),
        allowed_token_ids=_allowed_token_ids(given, model),
        prompt_logprobs=_alternatives(response, "prompt_logprobs"),
        keep_top_k_duplicates=(
            given.keep_top_k_duplicates if given.HasField("keep_top_k_duplicates") else True
        ),
    )


def check_ids(ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Raises Inadmissible for an id that is not below the vocabulary's size, the width of the logits."""
    if max(ids, default=0) >= vocab_size:
        raise Inadmissible(f"A token id in {param} is not below the vocabulary size, {vocab_size}.", param)


def _temperature(given: common_pb2.SamplingParams, model: ModelFacts) -> float:
    if not given.HasField("temperature"):
        return 1.0 if model.default_temperature is None else model.default_temperature
    if given.temperature not in TEMPERATURE:
        raise Inadmissible(f"temperature must be {TEMPERATURE}.", "temperature")
    return given.temperature


def _top_p(given: common_pb2.SamplingParams, model: ModelFacts) -> float:
    if not given.HasField("top_p"):
        return 1.0 if model.default_top_p is None else model.default_top_p
    if given.top_p not in TOP_P:
        raise Inadmissible("top_p must be above 0 and at most 1.", "top_p")
    return given.top_p


def _top_k(given: common_pb2.SamplingParams, model: ModelFacts) -> int:
    """Number of best tokens to keep; 0 is off."""
    if not given.HasField("top_k"):
        return max(0, model.default_top_k or 0)
    if given.top_k not in TOP_K:
        raise Inadmissible("top_k must be at least 1, or 0 or -1 for off.", "top_k")
    return max(0, given.top_k)


def _min_p(given: common_pb2.SamplingParams, model: ModelFacts) -> float:
    if not given.HasField("min_p"):
        return model.default_min_p or 0.0
    if given.min_p not in MIN_P:
        raise Inadmissible("min_p must be between 0 and 1.", "min_p")
    return given.min_p


def _penalty(given: common_pb2.SamplingParams, name: str) -> float:
    value: float = getattr(given, name)
    if value not in PENALTY:
        raise Inadmissible(f"{name} must be between -2 and 2.", name)
    return value


def _repetition_penalty(given: common_pb2.SamplingParams, model: ModelFacts) -> float:
    if not given.HasField("repetition_penalty"):
        return 1.0 if model.default_repetition_penalty is None else model.default_repetition_penalty
    low, high = REPETITION.low, REPETITION.high
    # The wire rounds to float32, the nearest to 0.01 of which is below it.
    if not low * (1 - 1e-6) <= given.repetition_penalty <= high:
        raise Inadmissible(f"repetition_penalty must be between {low} and {high:g}.", "repetition_penalty")
    return given.repetition_penalty


def _logit_bias(
    given: common_pb2.SamplingParams, model: ModelFacts, limits: SequenceLimits
) -> tuple[tuple[int, float], ...]:
    pairs = tuple((entry.token_id, entry.bias) for entry in given.logit_bias)
    if len(pairs) > limits.max_logit_bias:
        raise Inadmissible(
            f"logit_bias has {len(pairs)} tokens; at most {limits.max_logit_bias} are taken here "
            "(max-logit-bias).",
            "logit_bias",
        )
    check_ids((token for token, _ in pairs), model.vocab_size, "logit_bias")
    if not all(bias in BIAS for _, bias in pairs):
        raise Inadmissible("A value in logit_bias must be between -100 and 100.", "logit_bias")
    if len(dict(pairs)) < len(pairs):
        raise Inadmissible("A token has two values in logit_bias.", "logit_bias")
    return pairs


def _bad_words(
    given: common_pb2.SamplingParams, model: ModelFacts, limits: SequenceLimits
) -> tuple[tuple[int, ...], ...]:
    words = tuple(dict.fromkeys(tuple(word.token_ids) for word in given.bad_words))
    if len(given.bad_words) > limits.max_bad_words:
        raise Inadmissible(
            f"There are {len(given.bad_words)} bad_words; at most {limits.max_bad_words} are taken here "
            "(max-bad-words).",
            "bad_words",
        )
    for word in words:
        if not 1 <= len(word) <= limits.max_bad_word_tokens:
            raise Inadmissible(
                f"One of bad_words has {len(word)} tokens; 1 to {limits.max_bad_word_tokens} are taken here "
                "(max-bad-word-tokens).",
                "bad_words",
            )
        check_ids(word, model.vocab_size, "bad_words")
    return words


def _allowed_token_ids(given: common_pb2.SamplingParams, model: ModelFacts) -> tuple[int, ...]:
    ids = tuple(dict.fromkeys(given.allowed_token_ids))
    check_ids(ids, model.vocab_size, "allowed_token_ids")
    return ids


def _alternatives(response: common_pb2.ResponseOptions, name: str) -> int:
    """How many alternatives to report; -1: nothing at all."""
    if not response.HasField(name):  # type: ignore[arg-type]
        return -1
    count: int = getattr(response, name)
    if count > MAX_TOP_LOGPROBS:
        raise Inadmissible(f"{name} must be at most {MAX_TOP_LOGPROBS}.", name)
    return count
