"""Refusals of requests, and the checks that need no engine: shapes and sizes.

Token ids, stop tokens and sampling values are judged by the engine, which alone knows the model."""

from __future__ import annotations

from dataclasses import dataclass

from catenary.sequence_limits import (
    ALLOWED_TOKEN_IDS,
    BAD_WORDS,
    BEAM_WIDTH,
    LOGIT_BIAS,
    MAX_CACHE_SALT,
    MAX_CONSTRAINT_AFTER,
    MAX_CONSTRAINT_BYTES,
    MAX_NAME,
    MAX_TENANT,
    MAX_TOP_LOGPROBS,
    MAX_TRACEPARENT,
    STOP_TOKEN_IDS,
)
from catenary.telemetry import is_request_id
from catenary.v1 import common_pb2


class Refused(Exception):
    """A request was not accepted.

    The message is the router's own fixed text, meant for the caller. The service layer turns it into a gRPC
    status (`Generate`) or a `Refusal` (`Session`).
    """

    def __init__(
        self,
        code: common_pb2.ErrorCode.ValueType,
        message: str,
        *,
        param: str | None = None,
        retryable: bool = False,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(message)
        self.error = common_pb2.Error(
            code=code, message=message, param=param, retryable=retryable, retry_after_ms=retry_after_ms
        )

    @classmethod
    def of(cls, error: common_pb2.Error) -> Refused:
        """Return the refusal with the error of an engine."""
        refusal = cls(error.code, error.message)
        refusal.error = error
        return refusal


def too_late(wait_s: float, retry_after_ms: int) -> Refused:
    """Return the refusal of a sequence that has waited `wait_s`, as long as it may."""
    return Refused(
        common_pb2.ERROR_CODE_TIMEOUT,
        f"No engine had room for the request within {wait_s:g} seconds (lane-wait-s, or the request's own "
        "limit). Try again later.",
        retryable=True,
        retry_after_ms=retry_after_ms,
    )


def not_served(retry_after_ms: int | None = None) -> Refused:
    """Return the refusal for a model that no engine serves."""
    return Refused(
        common_pb2.ERROR_CODE_UNAVAILABLE,
        "No engine serves the model at the moment.",
        retryable=True,
        retry_after_ms=retry_after_ms,
    )


def does_not_fit(tokens: int, largest: int) -> Refused:
    """Return the refusal of a prompt that, with one token more, fits in no engine's KV."""
    return Refused(
        common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED,
        f"The request needs room for {tokens} tokens; the KV of the model's largest engine has {largest}.",
        param="prompt",
    )


def too_long(tokens: int, longest: int) -> Refused:
    """Return the refusal of a sequence that is too long for every engine of the model."""
    return Refused(
        common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED,
        f"The request has {tokens} tokens; the longest sequence of the model's engines has {longest}.",
        param="prompt",
    )


_CLASSES = frozenset(common_pb2.PriorityClass.values())
_TASKS: dict[int, str] = {
    common_pb2.MODEL_TASK_GENERATE: "generate",
    common_pb2.MODEL_TASK_EMBED: "embed",
    common_pb2.MODEL_TASK_SCORE: "score",
    common_pb2.MODEL_TASK_CLASSIFY: "classify",
}


@dataclass(frozen=True, slots=True)
class SpecLimits:
    """Largest request that is looked at."""

    max_request_tokens: int


def validate(spec: common_pb2.SequenceSpec, limits: SpecLimits) -> None:
    """Check what any sequence must satisfy.

    Raises:
        Refused: INVALID_ARGUMENT or CONTEXT_LENGTH_EXCEEDED, naming the parameter.
    """
    if not spec.model:
        raise _invalid("model", "The model name is missing.")
    if len(spec.model) > MAX_NAME:
        raise _invalid("model", f"The model name is longer than {MAX_NAME} characters.")
    if spec.request_id and not is_request_id(spec.request_id):
        raise _invalid("request_id", "The request id must be 1 to 128 letters, digits or any of ._:@/+=-")
    if len(spec.traceparent) > MAX_TRACEPARENT:
        raise _invalid("traceparent", f"The trace context is longer than {MAX_TRACEPARENT} characters.")
    _validate_tokens(spec, limits)
    if len(spec.stopping.stop_token_ids) > STOP_TOKEN_IDS.router:
        raise _invalid("stop_token_ids", f"There are more than {STOP_TOKEN_IDS.router} stop token ids.")
    for name, asked in (
        ("top_logprobs", spec.response.top_logprobs),
        ("prompt_logprobs", spec.response.prompt_logprobs),
    ):
        if asked > MAX_TOP_LOGPROBS:
            raise _invalid(name, f"{name} is above {MAX_TOP_LOGPROBS}.")
    if spec.HasField("pooling"):
        _validate_pooling(spec)
    _validate_sampling(spec.sampling)
    if spec.HasField("constraint"):
        _validate_constraint(spec.constraint)
    if spec.HasField("beam_search"):
        _validate_beams(spec.beam_search)
    _validate_admission(spec)
    if len(spec.cache_salt) > MAX_CACHE_SALT:
        raise _invalid("cache_salt", f"cache_salt is longer than {MAX_CACHE_SALT} characters.")


def validate_task(spec: common_pb2.SequenceSpec, model: common_pb2.ModelInfo) -> None:
    """Check that `model` is served for what the sequence asks for.

    Raises:
        Refused: INVALID_ARGUMENT, naming the parameter.
    """
    tasks = model.tasks or (common_pb2.MODEL_TASK_GENERATE,)
    pooled = spec.HasField("pooling")
    wanted = spec.pooling.task if pooled else common_pb2.MODEL_TASK_GENERATE
    if wanted not in tasks:
        raise _invalid("model", f"The model is not served to {_TASKS[wanted]}.")
    if pooled and spec.pooling.dimensions > model.embedding_width:
        raise _invalid("dimensions", f"dimensions is above the model's width, {model.embedding_width}.")


def _validate_admission(spec: common_pb2.SequenceSpec) -> None:
    if spec.priority_class not in _CLASSES:
        raise _invalid("priority_class", "priority_class is not one of the contract's.")
    if len(spec.tenant) > MAX_TENANT:
        raise _invalid("tenant", f"tenant is longer than {MAX_TENANT} characters.")
    if len(spec.session_id) > MAX_NAME:
        raise _invalid("session_id", f"session_id is longer than {MAX_NAME} characters.")


def _validate_pooling(spec: common_pb2.SequenceSpec) -> None:
    pooling = spec.pooling
    if pooling.task not in _TASKS or pooling.task == common_pb2.MODEL_TASK_GENERATE:
        raise _invalid("task", "The task of a pooled sequence must be to embed, to score or to classify.")
    if pooling.HasField("dimensions"):
        if pooling.task != common_pb2.MODEL_TASK_EMBED:
            raise _invalid("dimensions", "Only vectors have dimensions; scores and classes have none.")
        if pooling.dimensions < 1:
            raise _invalid("dimensions", "dimensions must be at least 1.")
    if pooling.HasField("second_start") and not 1 <= pooling.second_start < len(spec.token_ids):
        raise _invalid("second_start", "second_start must be the index of a token but the first.")
    for name in ("sampling", "stopping", "response", "constraint", "beam_search"):
        if spec.HasField(name):
            raise _invalid(name, f"{name} has no meaning where nothing is generated.")


def _validate_sampling(sampling: common_pb2.SamplingParams) -> None:
    """Check the size of the lists; the engine judges their contents."""
    words = len(sampling.bad_words) + sum(len(word.token_ids) for word in sampling.bad_words)
    for name, size, limit in (
        ("logit_bias", len(sampling.logit_bias), LOGIT_BIAS),
        ("bad_words", words, BAD_WORDS),
        ("allowed_token_ids", len(sampling.allowed_token_ids), ALLOWED_TOKEN_IDS),
    ):
        if size > limit.router:
            raise _invalid(name, f"{name} has more than {limit.router} token ids.")


def _validate_constraint(constraint: common_pb2.Constraint) -> None:
    """Check the sizes; the tokenizer service and the engine judge the contents."""
    if len(constraint.source.encode()) > MAX_CONSTRAINT_BYTES:
        raise _invalid("constraint", f"The constraint is longer than {MAX_CONSTRAINT_BYTES} bytes.")
    if len(constraint.after) > MAX_CONSTRAINT_AFTER:
        raise _invalid("constraint", f"constraint.after is longer than {MAX_CONSTRAINT_AFTER} characters.")


def _validate_beams(given: common_pb2.BeamSearch) -> None:
    """Check the fields that the router relies on; the engine has limits of its own."""
    if not 1 <= given.width <= BEAM_WIDTH.router:
        raise _invalid(
            "use_beam_search", f"A beam search has 1 to {BEAM_WIDTH.router} beams, not {given.width}."
        )
    if not 1 <= given.results <= given.width:
        raise _invalid("use_beam_search", "A beam search reports 1 to as many hypotheses as it has beams.")


def sequences_of(spec: common_pb2.SequenceSpec) -> int:
    """Return as how many sequences a valid spec counts: a beam search is several in its engine."""
    return spec.beam_search.width if spec.HasField("beam_search") else 1


def _validate_tokens(spec: common_pb2.SequenceSpec, limits: SpecLimits) -> None:
    count = len(spec.token_ids)
    if count == 0:
        raise _invalid("prompt", "The prompt has no tokens.")
    if count > limits.max_request_tokens:
        raise Refused(
            common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED,
            f"The request has {count} tokens; the router takes at most {limits.max_request_tokens} "
            "(max-request-tokens).",
            param="prompt",
        )
    if spec.HasField("prompt_len") and not 1 <= spec.prompt_len <= count:
        raise _invalid("prompt_len", f"prompt_len must be between 1 and the number of token ids, {count}.")


def _invalid(param: str, message: str) -> Refused:
    return Refused(common_pb2.ERROR_CODE_INVALID_ARGUMENT, message, param=param)
