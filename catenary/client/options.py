"""The options that a client gives with a sequence, and the results that it gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from catenary.parameters import (
    BIAS,
    PARAMETERS,
    SAMPLING,
    TOKENS,
    SamplingNumbers,
    check_names,
    check_number,
)
from catenary.v1 import common_pb2


class GenerateOptions(SamplingNumbers, total=False):
    """Parameters of a sequence, by the names of SequenceSpec in protos/catenary/v1/common.proto, which says
    what they mean. What is left out takes the model's own default."""

    prompt_len: int | None
    keep_top_k_duplicates: bool | None
    logit_bias: Mapping[int, float]
    bad_words: Sequence[Sequence[int]]
    allowed_token_ids: Sequence[int]
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop_token_ids: Sequence[int]
    ignore_eos: bool | None
    top_logprobs: int | None
    prompt_logprobs: int | None
    priority: int | None
    cache_salt: str | None
    constraint: common_pb2.Constraint | None
    beam_search: common_pb2.BeamSearch | None


_FLAGS = ("keep_top_k_duplicates", "ignore_eos")
_IDS = ("allowed_token_ids", "stop_token_ids")
_MESSAGES = {"constraint": common_pb2.Constraint, "beam_search": common_pb2.BeamSearch}


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse what the service would refuse, or never see, when it is given.

    Raises TypeError (UnknownNameError) for a name that is no option, and ValueError for a value.
    """
    check_names(options, GenerateOptions.__annotations__, kind="option")
    for name, value in options.items():
        if value is not None:
            _check_value(name, value)


def _check_value(name: str, value: Any) -> None:
    if name in PARAMETERS:
        check_number(name, value, PARAMETERS[name])
    elif name == "prompt_len":
        check_number(name, value, PARAMETERS["max_tokens"])
    elif name in _FLAGS and not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {value!r}")
    elif name in _IDS:
        _check_ids(name, value)
    elif name == "bad_words":
        for word in value:
            _check_ids(name, word)
    elif name == "logit_bias":
        if not isinstance(value, Mapping):
            raise ValueError("logit_bias must be a mapping of token ids to numbers")
        _check_ids(name, list(value))
        for bias in value.values():
            check_number("a value in logit_bias", bias, BIAS)
    elif name == "cache_salt" and not isinstance(value, str):
        raise ValueError(f"cache_salt must be a text, not {value!r}")
    elif name in _MESSAGES and not isinstance(value, _MESSAGES[name]):
        raise ValueError(f"{name} must be a {_MESSAGES[name].__name__} of catenary.v1.common_pb2")


def _check_ids(name: str, ids: Any) -> None:
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
        raise ValueError(f"{name} must hold token ids, not {ids!r}: `tokenize` gives those of a text")
    for token in ids:
        check_number(f"an id in {name}", token, TOKENS)


def make_spec(
    token_ids: Sequence[int], model: str, request_id: str, options: GenerateOptions
) -> common_pb2.SequenceSpec:
    """Return the sequence on the wire."""
    given: Mapping[str, Any] = options
    numbers: dict[str, Any] = {name: given.get(name) for name in SAMPLING}
    return common_pb2.SequenceSpec(
        request_id=request_id,
        model=model,
        token_ids=token_ids,
        prompt_len=options.get("prompt_len"),
        sampling=common_pb2.SamplingParams(
            **numbers,
            keep_top_k_duplicates=options.get("keep_top_k_duplicates"),
            logit_bias=[
                common_pb2.LogitBias(token_id=token, bias=bias)
                for token, bias in (options.get("logit_bias") or {}).items()
            ],
            bad_words=[common_pb2.TokenSequence(token_ids=word) for word in options.get("bad_words") or ()],
            allowed_token_ids=options.get("allowed_token_ids") or (),
            seed=options.get("seed"),
        ),
        stopping=common_pb2.StoppingParams(
            max_tokens=options.get("max_tokens"),
            min_tokens=options.get("min_tokens"),
            stop_token_ids=options.get("stop_token_ids") or (),
            ignore_eos=options.get("ignore_eos"),
        ),
        response=common_pb2.ResponseOptions(
            top_logprobs=options.get("top_logprobs"), prompt_logprobs=options.get("prompt_logprobs")
        ),
        priority=options.get("priority"),
        cache_salt=options.get("cache_salt"),
        constraint=options.get("constraint"),
        beam_search=options.get("beam_search"),
    )


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a sequence; `cached_tokens` are those of the prompt whose KV came from the prefix cache, None
    where a stop string ended it before the engine told."""

    prompt_tokens: int
    cached_tokens: int | None
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of an answer, and the tokens that came with it. The last one has why it ended, "stop" or
    "length", and the usage."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. `token_ids` are all that were generated, a stop token included."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
