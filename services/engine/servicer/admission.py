"""Admission: what a router submits, checked against the engine's limits and resolved for the core."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from catenary.constraints import ConstraintKind
from catenary.kv_offer import well_formed
from catenary.parameters import BIAS, LENGTH_PENALTY, SAMPLING
from catenary.seeds import draw_seed
from catenary.sequence_limits import (
    BAD_WORD_TOKENS,
    BAD_WORDS,
    BEAM_NUMBERS,
    BEAM_WIDTH,
    LOGIT_BIAS,
    MAX_CACHE_SALT,
    MAX_CONSTRAINT_AFTER,
    MAX_CONSTRAINT_BYTES,
    MAX_SEQUENCE_ID,
    MAX_TOP_LOGPROBS,
    STOP_TOKEN_IDS,
)
from catenary.v1 import common_pb2, engine_pb2
from services.engine.domain import (
    BeamOptions,
    ConstraintOptions,
    PoolingOptions,
    SamplingOptions,
)
from services.engine.link import CapacityFacts, ModelFacts, OfferedKv, SubmitSequence
from services.engine.servicer.contract import task_of


class Inadmissible(Exception):
    """The sequence is refused with `error`; the same one is refused again by an engine like this one."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: common_pb2.ErrorCode.ValueType = common_pb2.ERROR_CODE_INVALID_ARGUMENT,
    ) -> None:
        super().__init__(message)
        self.error = common_pb2.Error(code=code, message=message, param=param)


@dataclass(frozen=True, slots=True)
class SequenceLimits:
    """How much a sequence may bring besides its prompt."""

    max_stop_token_ids: int = STOP_TOKEN_IDS.engine
    max_logit_bias: int = LOGIT_BIAS.engine
    max_bad_words: int = BAD_WORDS.engine
    max_bad_word_tokens: int = BAD_WORD_TOKENS.engine
    max_beam_width: int = BEAM_WIDTH.engine
    max_beam_numbers: int = BEAM_NUMBERS.engine


def resolve_sampling(
    spec: common_pb2.SequenceSpec, model: ModelFacts, limits: SequenceLimits
) -> SamplingOptions:
    """Return the sequence's sampling options. Draws a seed if it has none. Raises Inadmissible."""
    given, response = spec.sampling, spec.response
    return SamplingOptions(
        **_numbers(given, model),
        seed=given.seed if given.HasField("seed") else draw_seed(),
        top_logprobs=_alternatives(response, "top_logprobs"),
        logit_bias=_logit_bias(given, model, limits),
        bad_words=_bad_words(given, model, limits),
        allowed_token_ids=_allowed_token_ids(given, model),
        prompt_logprobs=_alternatives(response, "prompt_logprobs"),
        keep_top_k_duplicates=(
            given.keep_top_k_duplicates if given.HasField("keep_top_k_duplicates") else True
        ),
    )


def check_ids(ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Raise Inadmissible for an id that is not below the vocabulary's size, the width of the logits."""
    if max(ids, default=0) >= vocab_size:
        raise Inadmissible(f"A token id in {param} is not below the vocabulary size, {vocab_size}.", param)


def _numbers(given: common_pb2.SamplingParams, model: ModelFacts) -> dict[str, Any]:
    """Return the numbers of SAMPLING: those given, else the model's defaults, else neutral ones."""
    found: dict[str, Any] = {}
    for name, one in SAMPLING.items():
        if not given.HasField(name):  # type: ignore[arg-type]
            found[name] = model.sampling_defaults.get(name, one.default)
            continue
        found[name] = getattr(given, name)
        try:
            one.check_sent(name, found[name])
        except ValueError as error:
            raise Inadmissible(str(error), name) from None
    # -1 turns it off, too.
    found["top_k"] = max(0, int(found["top_k"]))
    return found


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
    """Return the number of alternatives to report; -1: no log probabilities at all."""
    if not response.HasField(name):  # type: ignore[arg-type]
        return -1
    count: int = getattr(response, name)
    if count > MAX_TOP_LOGPROBS:
        raise Inadmissible(f"{name} must be at most {MAX_TOP_LOGPROBS}.", name)
    return count


def resolve_beams(
    spec: common_pb2.SequenceSpec, capacity: CapacityFacts, limits: SequenceLimits, max_tokens: int
) -> BeamOptions | None:
    """Return the beam search of a spec, None if it has none. Raises Inadmissible.

    `max_tokens`: the most tokens of a beam.
    """
    if not spec.HasField("beam_search"):
        return None
    given = spec.beam_search
    _check_beams(spec, capacity, limits)
    asked = spec.response.top_logprobs if spec.response.HasField("top_logprobs") else -1
    numbers = given.results * max_tokens * (1 if asked < 0 else 2 + 2 * asked)
    if numbers > limits.max_beam_numbers:
        raise Inadmissible(
            f"The hypotheses can come to {numbers} tokens, log probabilities and alternatives; at most "
            f"{limits.max_beam_numbers} are taken here (max-beam-numbers). Lower max_tokens.",
            "max_tokens",
        )
    return BeamOptions(given.width, given.length_penalty, given.early_stopping, given.results, asked)


def _check_beams(spec: common_pb2.SequenceSpec, capacity: CapacityFacts, limits: SequenceLimits) -> None:
    given, most = spec.beam_search, min(limits.max_beam_width, capacity.max_running)
    if limits.max_beam_width == 0:
        raise Inadmissible(
            "This engine takes no beam search (max-beam-width is 0, or contiguous-kv is on).",
            "use_beam_search",
            common_pb2.ERROR_CODE_UNSUPPORTED,
        )
    if not 1 <= given.width <= most:
        raise Inadmissible(
            f"A beam search has 1 to {most} beams here (max-beam-width, max-num-seqs), not {given.width}.",
            "use_beam_search",
        )
    if not 1 <= given.results <= given.width:
        raise Inadmissible(
            f"A search of {given.width} beams reports 1 to as many, not {given.results}.", "use_beam_search"
        )
    if given.length_penalty not in LENGTH_PENALTY:
        low, high = LENGTH_PENALTY.low, LENGTH_PENALTY.high
        raise Inadmissible(f"length_penalty must be between {low:g} and {high:g}.", "length_penalty")
    if spec.HasField("constraint"):
        raise Inadmissible("A beam search cannot have a constraint.", "constraint")
    if spec.HasField("prompt_len") and spec.prompt_len != len(spec.token_ids):
        raise Inadmissible("A beam search emits nothing that it could be resumed with.", "prompt_len")


# An offer that no engine can honour: the core counts it as such and computes the prompt.
_NOTHING = OfferedKv("", "", b"", "", 0, 0, b"")


def offer_of(message: common_pb2.KvOffer) -> OfferedKv:
    """Return an offer for the core; for one that breaks the contract's bounds, one that cannot be fetched."""
    if not well_formed(message):
        return _NOTHING
    return OfferedKv(
        connector=message.connector,
        address=message.address,
        ticket=message.ticket,
        host_id=message.host_id,
        blocks=message.blocks,
        tokens=message.tokens,
        layout=message.layout,
    )


def with_role(resolved: SubmitSequence, submit: common_pb2.Submit, role: str) -> SubmitSequence:
    """Return the sequence with the part of a prefill/decode split that the submit names. Raises Inadmissible.

    An engine that does not fetch ignores an offer and computes the prompt.
    """
    if submit.prefill_only:
        if role != "prefill":
            raise Inadmissible("This engine computes no prompts for others (role).", "prefill_only")
        if resolved.pooling is not None or resolved.beams is not None:
            raise Inadmissible("Only sequences that sample can be handed over.", "prefill_only")
        if not 2 <= resolved.prompt_len == len(resolved.token_ids):
            message = "A prompt that is handed over has at least 2 tokens, and none after it."
            raise Inadmissible(message, "prompt")
        if resolved.sampling.prompt_logprobs >= 0:
            raise Inadmissible("A prompt that is handed over is not scored.", "prompt_logprobs")
        return replace(resolved, prefill_only=True)
    if submit.HasField("kv_offer") and role == "decode":
        return replace(resolved, kv_offer=offer_of(submit.kv_offer))
    return resolved


def resolve_document(
    spec: common_pb2.SequenceSpec, model: ModelFacts, context: int, key: int
) -> SubmitSequence:
    """Return the document for the core, under `key`. Raises Inadmissible.

    `context`: tokens of the longest document.
    """
    pooling, total = spec.pooling, len(spec.token_ids)
    if pooling.task != task_of(model) or model.task == "generate":
        raise Inadmissible(f"This engine's model is served for another task: {model.task}.", "model")
    for name in ("sampling", "stopping", "response", "constraint", "beam_search"):
        if spec.HasField(name):
            raise Inadmissible(f"{name} has no meaning where nothing is generated.", name)
    if total == 0:
        raise Inadmissible("The document is empty.", "input")
    if spec.HasField("prompt_len") and spec.prompt_len != total:
        raise Inadmissible(f"prompt_len must be the number of token ids, {total}.", "prompt_len")
    if total > context:
        raise Inadmissible(
            f"The document has {total} tokens; the longest one here has {context}.",
            "input",
            common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED,
        )
    if max(spec.token_ids) >= model.vocab_size:
        raise Inadmissible(f"A token id is not below the vocabulary size, {model.vocab_size}.", "input")
    if pooling.HasField("second_start") and not 1 <= pooling.second_start < total:
        raise Inadmissible(f"second_start must be between 1 and {total - 1}.", "second_start")
    return SubmitSequence(
        key=key,
        token_ids=list(spec.token_ids),
        prompt_len=total,
        sampling=SamplingOptions(),
        max_tokens=0,
        min_tokens=0,
        stop_token_ids=[],
        ignore_eos=False,
        priority=spec.priority,
        pooling=PoolingOptions(_dimensions(pooling, model), pooling.second_start, pooling.raw),
    )


def _dimensions(pooling: common_pb2.Pooling, model: ModelFacts) -> int:
    """Return the width to cut vectors to, 0 for no cut."""
    if not pooling.HasField("dimensions"):
        return 0
    wanted, width = pooling.dimensions, model.embedding_width
    allowed = 1 <= wanted <= width and (model.any_dimensions or wanted in model.embedding_dimensions)
    if wanted != width and not allowed:
        raise Inadmissible("The model's vectors cannot be cut to so many dimensions.", "dimensions")
    # The whole width asks for nothing.
    return 0 if wanted == width else wanted


@dataclass(frozen=True, slots=True)
class Admission:
    """Checks sequences against one model on one engine. Pure but for the seed it draws when none is given."""

    served_model_name: str
    model: ModelFacts
    capacity: CapacityFacts
    limits: SequenceLimits

    @property
    def context(self) -> int:
        """Longest sequence in tokens: the model's context, or the whole KV pool if that is smaller."""
        return min(self.model.max_model_len, self.capacity.block_size * self.capacity.total_blocks)

    def resolve(self, spec: common_pb2.SequenceSpec, key: int, same_prompt_as: int = 0) -> SubmitSequence:
        """Return the sequence for the core, under `key`, with every default filled in. Raises Inadmissible.

        `same_prompt_as`: the key of a sequence with the same prompt, 0 for none.
        """
        if spec.model != self.served_model_name:
            message = "This engine does not serve the named model."
            raise Inadmissible(message, "model", common_pb2.ERROR_CODE_MODEL_NOT_FOUND)
        if len(spec.request_id) > MAX_SEQUENCE_ID:
            raise Inadmissible(f"request_id is longer than {MAX_SEQUENCE_ID} characters.", "request_id")
        if spec.HasField("pooling"):
            return resolve_document(spec, self.model, self.context, key)
        if self.model.task != "generate":
            raise Inadmissible("This engine's model does not generate.", "model")
        prompt_len = self._prompt_len(spec)
        max_tokens, min_tokens = self._lengths(spec, prompt_len)
        return SubmitSequence(
            key=key,
            token_ids=list(spec.token_ids),
            prompt_len=prompt_len,
            sampling=resolve_sampling(spec, self.model, self.limits),
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=self._stop_token_ids(spec.stopping),
            ignore_eos=spec.stopping.ignore_eos,
            priority=spec.priority,
            cache_salt=_cache_salt(spec),
            same_prompt_as=same_prompt_as,
            constraint=_constraint(spec),
            beams=resolve_beams(spec, self.capacity, self.limits, max_tokens),
        )

    def _prompt_len(self, spec: common_pb2.SequenceSpec) -> int:
        total = len(spec.token_ids)
        if total == 0:
            raise Inadmissible("The prompt is empty.", "prompt")
        prompt_len = spec.prompt_len if spec.HasField("prompt_len") else total
        if not 1 <= prompt_len <= total:
            message = (
                f"prompt_len must be between 1 and the number of token ids, {total}; it is {prompt_len}."
            )
            raise Inadmissible(message, "prompt_len")
        if total + 1 > self.context:
            message = (
                f"The prompt has {total} tokens; the longest sequence here is {self.context} tokens, "
                "and at least one must be left to generate."
            )
            raise Inadmissible(message, "prompt", common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED)
        if max(spec.token_ids) >= self.model.vocab_size:
            raise Inadmissible(
                f"A token id is not below the vocabulary size, {self.model.vocab_size}.", "prompt"
            )
        return prompt_len

    def _lengths(self, spec: common_pb2.SequenceSpec, prompt_len: int) -> tuple[int, int]:
        stopping, emitted = spec.stopping, len(spec.token_ids) - prompt_len
        max_tokens = self.context - prompt_len
        if stopping.HasField("max_tokens"):
            if stopping.max_tokens < 1:
                raise Inadmissible("max_tokens must be at least 1.", "max_tokens")
            if stopping.max_tokens > max_tokens:
                message = (
                    f"The prompt has {prompt_len} tokens and max_tokens is {stopping.max_tokens}; "
                    f"together they exceed the longest sequence here, {self.context} tokens."
                )
                raise Inadmissible(message, "max_tokens", common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED)
            max_tokens = stopping.max_tokens
        if emitted >= max_tokens:
            message = f"The sequence already has the {max_tokens} tokens that max_tokens allows."
            raise Inadmissible(message, "max_tokens")
        if stopping.min_tokens > max_tokens:
            message = f"min_tokens is {stopping.min_tokens}; it must not exceed max_tokens, {max_tokens}."
            raise Inadmissible(message, "min_tokens")
        return max_tokens, stopping.min_tokens

    def _stop_token_ids(self, stopping: common_pb2.StoppingParams) -> list[int]:
        ids = list(dict.fromkeys(stopping.stop_token_ids))
        if len(stopping.stop_token_ids) > self.limits.max_stop_token_ids:
            message = f"There are more than {self.limits.max_stop_token_ids} stop_token_ids."
            raise Inadmissible(message, "stop_token_ids")
        check_ids(ids, self.model.vocab_size, "stop_token_ids")
        return ids


def _cache_salt(spec: common_pb2.SequenceSpec) -> str:
    if len(spec.cache_salt) > MAX_CACHE_SALT:
        raise Inadmissible(f"cache_salt is longer than {MAX_CACHE_SALT} characters.", "cache_salt")
    return spec.cache_salt


def _constraint(spec: common_pb2.SequenceSpec) -> ConstraintOptions | None:
    if not spec.HasField("constraint"):
        return None
    given = spec.constraint
    try:
        kind = ConstraintKind(given.kind)
    except ValueError:
        raise Inadmissible("The constraint is of no known kind.", "constraint") from None
    if not given.source:
        raise Inadmissible("The constraint is empty.", "constraint")
    if len(given.source.encode()) > MAX_CONSTRAINT_BYTES:
        raise Inadmissible(f"The constraint is longer than {MAX_CONSTRAINT_BYTES} bytes.", "constraint")
    if given.HasField("after") and not 1 <= len(given.after) <= MAX_CONSTRAINT_AFTER:
        message = f"The text that a constraint begins after has 1 to {MAX_CONSTRAINT_AFTER} characters."
        raise Inadmissible(message, "constraint")
    return ConstraintOptions(kind, given.source, given.after or None, given.closed_objects)


_RETRY_MS = 1000

_NOT_TAKING = {
    engine_pb2.ENGINE_STATE_DRAINING: (common_pb2.ERROR_CODE_DRAINING, "The engine is shutting down."),
    engine_pb2.ENGINE_STATE_STALLED: (common_pb2.ERROR_CODE_UNAVAILABLE, "The engine makes no progress."),
    engine_pb2.ENGINE_STATE_NOT_SERVING: (
        common_pb2.ERROR_CODE_UNAVAILABLE,
        "The engine's core is starting again.",
    ),
}
_STARTING = (common_pb2.ERROR_CODE_UNAVAILABLE, "The engine is starting.")


def duplicate() -> common_pb2.Error:
    """Return the error of a handle that was used before on its stream."""
    return common_pb2.Error(
        code=common_pb2.ERROR_CODE_DUPLICATE_REQUEST,
        message="The handle is in use or was used on this stream.",
    )


def not_taking(state: engine_pb2.EngineState.ValueType) -> common_pb2.Error:
    """Return the error of an engine in a state in which it takes no sequence."""
    code, message = _NOT_TAKING.get(state, _STARTING)
    return common_pb2.Error(code=code, message=message, retryable=True, retry_after_ms=_RETRY_MS)


def full(limit: int) -> common_pb2.Error:
    """Return the error of an engine that holds `limit` sequences."""
    return _overloaded(f"The engine is full: it holds {limit} sequences (max_num_seqs plus max_waiting).")


def reserved() -> common_pb2.Error:
    """Return the error of an engine that is reserved for another router."""
    return _overloaded("The engine is kept for a sequence of another router.")


def not_alone() -> common_pb2.Error:
    """Return the error of a quarantined sequence at an engine that has others."""
    return _overloaded("The engine has other sequences.")


def engine_lost(message: str) -> common_pb2.Error:
    """Return the error of a live sequence that is lost with the engine's core."""
    return common_pb2.Error(code=common_pb2.ERROR_CODE_ENGINE_LOST, message=message, retryable=True)


def _overloaded(message: str) -> common_pb2.Error:
    return common_pb2.Error(
        code=common_pb2.ERROR_CODE_OVERLOADED, message=message, retryable=True, retry_after_ms=_RETRY_MS
    )
