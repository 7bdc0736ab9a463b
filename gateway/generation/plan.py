"""What a request becomes before anything is sent: prompts as ids, and one sequence per choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from catenary.seeds import derive_seed, draw_seed
from catenary.v1 import common_pb2
from gateway.errors import bad_request, context_length_exceeded
from gateway.schemas.base import GenerationFields
from gateway.text.models import Model


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """Prompts and parameters of one request, all checked. Choice p * n + i is sample i of prompt p."""

    request_id: str
    model: Model
    prompts: Sequence[Sequence[int]]
    max_tokens: Sequence[int]
    n: int
    fields: GenerationFields
    cache_salt: str = ""
    constraint: common_pb2.Constraint | None = None

    @property
    def top_count(self) -> int | None:
        """Alternatives to report for each token; None: no log probabilities."""
        return self.fields.top_count

    @property
    def count(self) -> int:
        """Choices in all."""
        return len(self.prompts) * self.n

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(prompt) for prompt in self.prompts)

    def specs(self, traceparent: str | None) -> list[common_pb2.SequenceSpec]:
        """The sequences, by choice."""
        return [
            self._spec(prompt, sample, seed, traceparent)
            for prompt, seed in enumerate(self._seeds())
            for sample in range(self.n)
        ]

    def _seeds(self) -> list[int]:
        if self.fields.seed is not None:
            return [self.fields.seed] * len(self.prompts)
        return [draw_seed() for _ in self.prompts]

    def _spec(self, prompt: int, sample: int, seed: int, traceparent: str | None) -> common_pb2.SequenceSpec:
        fields = self.fields
        ids = self.prompts[prompt]
        response = None
        if self.top_count is not None:
            response = common_pb2.ResponseOptions(top_logprobs=self.top_count)
        return common_pb2.SequenceSpec(
            request_id=f"{self.request_id}-{prompt * self.n + sample}",
            model=self.model.name,
            token_ids=ids,
            prompt_len=len(ids),
            sampling=common_pb2.SamplingParams(
                temperature=fields.temperature,
                top_p=fields.top_p,
                top_k=fields.top_k,
                min_p=fields.min_p,
                repetition_penalty=fields.repetition_penalty,
                seed=seed if self.n == 1 else derive_seed(seed, sample),
            ),
            stopping=common_pb2.StoppingParams(
                max_tokens=self.max_tokens[prompt],
                min_tokens=fields.min_tokens,
                stop_token_ids=fields.stop_token_ids or (),
                ignore_eos=fields.ignore_eos,
            ),
            response=response,
            traceparent=traceparent,
            cache_salt=self.cache_salt,
            constraint=self.constraint,
        )


def make_plan(
    *,
    request_id: str,
    model: Model,
    prompts: Sequence[Sequence[int]],
    fields: GenerationFields,
    default_max_tokens: int | None,
    param: str,
    cache_salt: str,
    constraint: common_pb2.Constraint | None = None,
) -> GenerationPlan:
    """Check what needs the model and the rendered prompts. Raises ApiError 400.

    Args:
        request_id: of the answer; each sequence's id is made from it.
        model: the model to generate with.
        prompts: token ids of each prompt.
        fields: the request.
        default_max_tokens: for a request without a limit; cut to what the context has room for; None: that.
        param: name of the field that the prompts came from.
        cache_salt: cached KV is shared only with requests that have the same one.
        constraint: what the text of every choice must be; it was checked.
    """
    _check_ids(fields.stop_token_ids or (), model, "stop_token_ids")
    limits = []
    for prompt in prompts:
        limits.append(_token_limit(len(prompt), model.max_model_len, fields, default_max_tokens, param))
        _check_ids(prompt, model, param)
    return GenerationPlan(request_id, model, prompts, limits, fields.choices, fields, cache_salt, constraint)


def _token_limit(prompt: int, context: int, fields: GenerationFields, default: int | None, param: str) -> int:
    requested = fields.token_limit
    if prompt + (requested or 1) > context:
        raise context_length_exceeded(context, prompt, requested or 1, param)
    room = context - prompt
    limit = requested or (room if default is None else min(default, room))
    if fields.min_tokens is not None and fields.min_tokens > limit:
        raise bad_request(f"Invalid 'min_tokens': only {limit} tokens can be generated.", "min_tokens")
    return limit


def _check_ids(ids: Sequence[int], model: Model, param: str) -> None:
    if not ids:
        if param != "stop_token_ids":
            raise bad_request(f"Invalid '{param}': the prompt has no tokens.", param)
        return
    if min(ids) < 0 or max(ids) >= model.vocab_size:
        raise bad_request(
            f"Invalid '{param}': an id is out of vocabulary (0 to {model.vocab_size - 1}).",
            param,
        )
