"""Sampling, beam search, pooling and structured output parameters with vLLM's names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, ClassVar, TypeVar

from catenary.nearest import near
from catenary.parameters import LENGTH_PENALTY, Numbers, UnknownNameError, check_number
from catenary.sequence_limits import MAX_BEAM_WIDTH
from catenary_apps.llm.endpoint import LIMITS, OfflineRequest
from gateway import ApiError
from gateway.schemas.base import parse_request

C = TypeVar("C", bound=type)

Absent = Mapping[str, tuple[tuple[Any, ...], str]]
"""Names of vLLM's that a class does not have: which values ask for nothing, and why others are refused."""


def names_what_is_near(cls: C) -> C:
    """Have a dataclass refuse an argument that it does not know with the one that is meant, perhaps."""
    return _checked(cls, {})


def lacks(absent: Absent) -> Callable[[C], C]:
    """Refuse parameters of vLLM's that this class lacks, unless they ask for nothing."""
    return lambda cls: _checked(cls, absent)


def _checked(cls: C, absent: Absent) -> C:
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]
    names = [field.name for field in fields(cls)]

    @wraps(init)
    def checked(self: Any, *arguments: Any, **given: Any) -> None:
        for name in [name for name in given if name not in names]:
            if name not in absent:
                raise UnknownNameError(f"{cls.__name__} has no parameter {name!r}{near(name, names)}")
            neutral, reason = absent[name]
            if (value := given.pop(name)) is not None and value not in neutral:
                raise ValueError(f"{cls.__name__} has no {name}: {reason}")
        init(self, *arguments, **given)

    cls.__init__ = checked  # type: ignore[misc]
    return cls


_BACKENDS = (None, "auto", "guidance", "llguidance")


@names_what_is_near
@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """Constraint of an answer, of exactly one kind. See docs/api.md for their meaning and limits.

    Args:
        json: a JSON schema, as an object or as text.
        regex: a regular expression that the whole answer matches.
        choice: the answer is one of these texts.
        grammar: a grammar in Lark's or GBNF's notation.
        json_object: True: the answer is a JSON object.
        structural_tag: tags whose inside is JSON, as an object or as text.
        disable_any_whitespace: False: it cannot be had.
        disable_additional_properties: False: it cannot be had.
        whitespace_pattern: None: it cannot be had.

    Raises ValueError at once for what no model can honour, and TypeError for a name that is not known.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None

    _KINDS: ClassVar = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.disable_any_whitespace:
            raise ValueError(f"{name}: disable_any_whitespace is not done; a regex or grammar can say it")
        if self.disable_additional_properties:
            reason = "an object that lists its properties has no others; else write additionalProperties"
            raise ValueError(f"{name}: disable_additional_properties is not done: {reason}")
        if self.whitespace_pattern is not None:
            raise ValueError(f"{name}: whitespace_pattern is not done; a regex or grammar can say it")
        given = [kind for kind in self._KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            found = ", ".join(given) or "none"
            raise ValueError(f"{name} takes one of {', '.join(self._KINDS)}, and there is {found}")
        try:
            asked = {"model": "any", "prompt": [0], "structured_outputs": self.body()}
            parse_request(OfflineRequest, asked, LIMITS)
        except ApiError as error:
            raise ValueError(error.message.replace("structured_outputs.", "")) from None

    def body(self) -> dict[str, Any]:
        """Return the kind as in the body of a request."""
        found = {}
        for kind in self._KINDS:
            value = getattr(self, kind)
            if isinstance(value, Mapping):
                value = dict(value)
            elif isinstance(value, Sequence) and not isinstance(value, str):
                value = list(value)
            if value not in (None, False):
                found[kind] = value
        return found


@names_what_is_near
@dataclass(frozen=True, slots=True)
class GuidedDecodingParams(StructuredOutputsParams):
    """`StructuredOutputsParams` by its older name, for `SamplingParams(guided_decoding=...)`.

    `backend`: there is one, which the engine chooses; another one's name gives a warning.
    """

    backend: str | None = None

    def __post_init__(self) -> None:
        # Not super(): a dataclass with slots is another class than the one that was written.
        StructuredOutputsParams.__post_init__(self)
        if self.backend not in _BACKENDS:
            line = "backend has no effect: llguidance does it, or xgrammar with grammar_backend of the LLM"
            warnings.warn(line, stacklevel=4)


_COUNT = Numbers(1, 2**31 - 1, whole=True)
_CUT = Numbers(-1, 2**31 - 1, whole=True)
_ABSENT: Absent = {
    "logits_processors": (
        (),
        "no code of a program's runs in the engine; logit_bias, bad_words and allowed_token_ids are there",
    ),
    "extra_args": (({},), "no code of a program's runs in the engine"),
    "flat_logprobs": ((False,), "log probabilities have one form"),
    "logprob_token_ids": ((), "logprobs reports the most probable ones"),
    "thinking_token_budget": ((), "reasoning is not bounded apart; max_tokens bounds all"),
    "repetition_detection": ((), "repetition_penalty is there"),
    "skip_reading_prefix_cache": ((False,), "LLM(enable_prefix_caching=False) has none"),
    "stream_interval": ((), "an answer comes as a whole"),
    "skip_clone": ((False, True), "parameters are read once"),
}


@lacks(_ABSENT)
@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """Parameters of a prompt. See docs/api.md for their meaning and limits: they are checked as those of a
    request over HTTP are, but for a temperature, which may be any number of at least 0. None takes the
    default of the model or of the API.

    `logprobs` is the number of alternatives to report for each token, `prompt_logprobs` the same for tokens
    of the prompt. `structured_outputs`: what the answer must look like, as StructuredOutputsParams or an
    object with one of its kinds; `guided_decoding` is its older name. `detokenize`: False: an answer has
    token ids and no text.

    Raises ValueError at once for a value that cannot be honoured by any model, and TypeError for a name that
    is not known. Values may be changed; a call checks them again.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = 0
    min_p: float | None = 0.0
    seed: int | None = None
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    repetition_penalty: float | None = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = 16
    min_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    guided_decoding: GuidedDecodingParams | Mapping[str, Any] | None = None
    detokenize: bool | None = None

    def __post_init__(self) -> None:
        if self.structured_outputs is not None and self.guided_decoding is not None:
            raise ValueError("guided_decoding is structured_outputs by its older name: give one of them")
        try:
            parse_request(OfflineRequest, {"model": "any", "prompt": [0], **self.body()}, LIMITS)
        except ApiError as error:
            raise ValueError(error.message) from None

    def body(self) -> dict[str, Any]:
        """Return the parameters that are set, as in the body of a request."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {name: value for name, value in values.items() if value is not None}
        if isinstance(self.logit_bias, Mapping):
            given["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        for name in ("allowed_token_ids", "bad_words", "stop_token_ids", "stop"):
            if isinstance(value := given.get(name), Sequence) and not isinstance(value, str):
                given[name] = list(value)
        guided = given.pop("guided_decoding", None)
        outputs = given.get("structured_outputs", guided)
        if isinstance(outputs, StructuredOutputsParams):
            given["structured_outputs"] = outputs.body()
        elif outputs is not None:
            given["structured_outputs"] = dict(outputs) if isinstance(outputs, Mapping) else outputs
        return given


@names_what_is_near
@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Parameters of a beam search.

    Args:
        beam_width: beams that are kept and given back; an engine's max_beam_width limits it too.
        max_tokens: most tokens to generate.
        ignore_eos: go on after the model's end-of-sequence token.
        temperature: 0 or 1: beams are ranked by the model's own probabilities.
        length_penalty: beams are sorted by their log probability over the number of generated tokens to the
            power of this.
        include_stop_str_in_output: the text has that of the end-of-sequence token.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        check_number("beam_width", self.beam_width, Numbers(1, MAX_BEAM_WIDTH, whole=True))
        check_number("max_tokens", self.max_tokens, _COUNT)
        check_number("length_penalty", self.length_penalty, LENGTH_PENALTY)
        if self.temperature not in (0, 1):
            reason = "beams are ranked by the model's own probabilities"
            raise ValueError(f"temperature must be 0 or 1, not {self.temperature!r}: {reason}")

    def body(self) -> dict[str, Any]:
        """Return the search as in the body of a request."""
        return {
            "use_beam_search": True,
            "n": self.beam_width,
            "max_tokens": self.max_tokens,
            "ignore_eos": self.ignore_eos,
            "length_penalty": self.length_penalty,
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "logprobs": 0,
        }


@names_what_is_near
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Parameters of a document.

    Args:
        dimensions: leading numbers of a vector to keep, if the model allows; None: all.
        use_activation: False: leave out the model's last step, so that vectors are not scaled to length 1,
            and scores and classes are logits.
        truncate_prompt_tokens: keep so many tokens of a longer text, -1: as many as the model takes.
        task: embed, classify or score, which must be the model's; None: what the model is for.
    """

    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    task: str | None = None

    def __post_init__(self) -> None:
        if self.dimensions is not None:
            check_number("dimensions", self.dimensions, _COUNT)
        if self.truncate_prompt_tokens is not None:
            check_number("truncate_prompt_tokens", self.truncate_prompt_tokens, _CUT)
            if self.truncate_prompt_tokens == 0:
                raise ValueError("truncate_prompt_tokens must be at least 1, or -1, not 0")
        if self.use_activation not in (None, True, False):
            raise ValueError(f"use_activation must be True, False or None, not {self.use_activation!r}")

    def body(self) -> dict[str, Any]:
        """Return the set parameters, as in the body of a request."""
        found = {
            "dimensions": self.dimensions,
            "truncate_prompt_tokens": self.truncate_prompt_tokens,
            "use_activation": self.use_activation,
        }
        return {name: value for name, value in found.items() if value is not None}
