"""Admission: a SequenceSpec from the wire becomes a fully resolved SubmitSequence, or a reasoned Error."""

from __future__ import annotations

import math
from dataclasses import dataclass

from catenary.schema import MAX_TOP_LOGPROBS
from catenary.seeds import draw_seed
from catenary.v1 import common_pb2
from services.engine.link import CapacityFacts, ModelFacts, SamplingOptions, SubmitSequence

MAX_REQUEST_ID = 256


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
class Admission:
    """Checks sequences against one model on one engine. Pure but for the seed it draws when none is given."""

    served_model_name: str
    model: ModelFacts
    capacity: CapacityFacts
    max_stop_token_ids: int

    @property
    def context(self) -> int:
        """Longest sequence in tokens: the model's context, or the whole KV pool if that is smaller."""
        return min(self.model.max_model_len, self.capacity.block_size * self.capacity.total_blocks)

    def resolve(self, spec: common_pb2.SequenceSpec, key: int) -> SubmitSequence:
        """The sequence with every default filled in, for the core, under `key`. Raises Inadmissible."""
        if spec.model != self.served_model_name:
            message = "This engine does not serve the named model."
            raise Inadmissible(message, "model", common_pb2.ERROR_CODE_MODEL_NOT_FOUND)
        if len(spec.request_id) > MAX_REQUEST_ID:
            raise Inadmissible(f"request_id is longer than {MAX_REQUEST_ID} characters.", "request_id")
        prompt_len = self._prompt_len(spec)
        max_tokens, min_tokens = self._lengths(spec, prompt_len)
        sampling = spec.sampling
        return SubmitSequence(
            key=key,
            token_ids=list(spec.token_ids),
            prompt_len=prompt_len,
            sampling=SamplingOptions(
                temperature=self._temperature(sampling),
                top_p=self._top_p(sampling),
                top_k=self._top_k(sampling),
                seed=sampling.seed if sampling.HasField("seed") else draw_seed(),
                top_logprobs=_top_logprobs(spec.response),
            ),
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=self._stop_token_ids(spec.stopping),
            ignore_eos=spec.stopping.ignore_eos,
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

    def _temperature(self, sampling: common_pb2.SamplingParams) -> float:
        if not sampling.HasField("temperature"):
            return 1.0 if self.model.default_temperature is None else self.model.default_temperature
        if not math.isfinite(sampling.temperature) or sampling.temperature < 0:
            raise Inadmissible("temperature must be a finite number of at least 0.", "temperature")
        return sampling.temperature

    def _top_p(self, sampling: common_pb2.SamplingParams) -> float:
        if not sampling.HasField("top_p"):
            return 1.0 if self.model.default_top_p is None else self.model.default_top_p
        if not 0 < sampling.top_p <= 1:
            raise Inadmissible("top_p must be above 0 and at most 1.", "top_p")
        return sampling.top_p

    def _top_k(self, sampling: common_pb2.SamplingParams) -> int:
        """Number of best tokens to keep; 0 is off."""
        if not sampling.HasField("top_k"):
            return max(0, self.model.default_top_k or 0)
        if sampling.top_k < -1:
            raise Inadmissible("top_k must be at least 1, or 0 or -1 for off.", "top_k")
        return max(0, sampling.top_k)

    def _stop_token_ids(self, stopping: common_pb2.StoppingParams) -> list[int]:
        ids = list(dict.fromkeys(stopping.stop_token_ids))
        if len(stopping.stop_token_ids) > self.max_stop_token_ids:
            message = f"There are more than {self.max_stop_token_ids} stop_token_ids."
            raise Inadmissible(message, "stop_token_ids")
        if ids and max(ids) >= self.model.vocab_size:
            message = f"A stop token id is not below the vocabulary size, {self.model.vocab_size}."
            raise Inadmissible(message, "stop_token_ids")
        return ids


def _top_logprobs(response: common_pb2.ResponseOptions) -> int:
    if not response.HasField("top_logprobs"):
        return -1
    if response.top_logprobs > MAX_TOP_LOGPROBS:
        raise Inadmissible(f"top_logprobs must be at most {MAX_TOP_LOGPROBS}.", "top_logprobs")
    return response.top_logprobs
