"""Admission: a SequenceSpec from the wire becomes a fully resolved SubmitSequence, or a reasoned Error."""

from __future__ import annotations

from dataclasses import dataclass

from catenary.constraints import ConstraintKind
from catenary.schema import MAX_CACHE_SALT, MAX_CONSTRAINT_AFTER, MAX_CONSTRAINT_BYTES
from catenary.v1 import common_pb2
from services.engine.domain import ConstraintOptions
from services.engine.link import CapacityFacts, ModelFacts, SubmitSequence
from services.engine.servicer.beams import resolve_beams
from services.engine.servicer.documents import resolve_document
from services.engine.servicer.inadmissible import Inadmissible
from services.engine.servicer.sampling import SequenceLimits, check_ids, resolve_sampling

# Of the protocol: both sides know it, and logs and metrics carry ids.
MAX_REQUEST_ID = 256


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
        """The sequence with every default filled in, for the core, under `key`. Raises Inadmissible.

        `same_prompt_as`: the key of one that has the same prompt, 0 for none.
        """
        if spec.model != self.served_model_name:
            message = "This engine does not serve the named model."
            raise Inadmissible(message, "model", common_pb2.ERROR_CODE_MODEL_NOT_FOUND)
        if len(spec.request_id) > MAX_REQUEST_ID:
            raise Inadmissible(f"request_id is longer than {MAX_REQUEST_ID} characters.", "request_id")
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
