"""Outputs of an LLM's calls, with vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from catenary.text import Vocabulary
from catenary_apps.llm.endpoint import OfflineRequest
from gateway.generation.generation import Generation
from gateway.streaming.delta import ChoiceResult, TokenLogprob

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural-log probability of a token. `rank` counts from 1 for the most probable one; None: not known.

    `decoded_token` is None without detokenization.
    """

    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice.

    `text` is empty without detokenization. `token_ids` are all that were generated, the stop token included.
    `logprobs` has for each token that is shown those of it and of its best alternatives, by id; None: not
    asked for. `stop_reason` is the stop text or the id in `stop_token_ids` that ended it, None for the
    model's own end and for a limit.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result of a prompt.

    `prompt` is its text, None for one that was given as ids. `prompt_logprobs` has one entry for each token
    of the prompt, the first of them None; None: not asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int | None
    finished: bool = True


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A vector, of length 1 unless the model's files or the request say other."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Numbers of the vector."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """One probability for each class, in the order of the model's labels."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Classes that the model tells apart."""
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """Degree to which two texts belong together."""

    score: float


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """The model's numbers for a document: float32, one dimension, on the CPU."""

    data: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Pooled(Generic[T]):
    request_id: str
    prompt_token_ids: list[int]
    outputs: T
    finished: bool = True


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput(_Pooled[EmbeddingOutput]):
    """The vector of a document."""


@dataclass(frozen=True, slots=True)
class ClassificationRequestOutput(_Pooled[ClassificationOutput]):
    """The classes of a document."""


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput(_Pooled[ScoringOutput]):
    """The score of a pair. `prompt_token_ids` are those of both texts."""


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput(_Pooled[PoolingOutput]):
    """The result of a document."""


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """A finished beam.

    `tokens` and `text` begin with the prompt. `logprobs` has an entry for each generated token, and
    `cum_logprob` is their sum, without the penalty of the length that beams are sorted by.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float
    text: str
    finish_reason: str
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The beams of a prompt, the best first."""

    sequences: list[BeamSearchSequence]


def request_output(
    generation: Generation, results: Sequence[ChoiceResult], prompt: str | None
) -> RequestOutput:
    """Return the output of a generation with one prompt, whose text it was, and its finished choices."""
    plan = generation.plan
    fields = plan.fields
    decodes = not (isinstance(fields, OfflineRequest) and fields.detokenize is False)
    vocabulary = plan.model.vocabulary if decodes else None
    details = generation.usage().prompt_tokens_details
    report = results[0].prompt
    scores = report.logprobs if report is not None else None
    return RequestOutput(
        request_id=plan.request_id,
        prompt=prompt,
        prompt_token_ids=list(plan.prompts[0]),
        prompt_logprobs=(
            None
            if scores is None
            else [None if value is None else _logprobs(token, value, vocabulary) for token, value in scores]
        ),
        outputs=[_completion(result, vocabulary) for result in results],
        num_cached_tokens=None if details is None else details.cached_tokens,
    )


def beam_output(found: RequestOutput, vocabulary: Vocabulary) -> BeamSearchOutput:
    """Return the beams of a prompt, each with the prompt in front, as vLLM's."""
    prompt = found.prompt_token_ids
    return BeamSearchOutput(
        [
            BeamSearchSequence(
                tokens=prompt + one.token_ids,
                logprobs=one.logprobs or [],
                cum_logprob=one.cumulative_logprob or 0.0,
                text=vocabulary.decode(prompt) + one.text,
                finish_reason=one.finish_reason,
                stop_reason=one.stop_reason,
            )
            for one in found.outputs
        ]
    )


def _completion(result: ChoiceResult, vocabulary: Vocabulary | None) -> CompletionOutput:
    scored = None
    if result.entries is not None:
        scored = [(entry.token_id, entry.logprob) for entry in result.entries if entry.logprob is not None]
    return CompletionOutput(
        index=result.index,
        text="" if vocabulary is None else result.text,
        token_ids=list(result.token_ids or ()),
        cumulative_logprob=None if scored is None else sum(value.sampled for _, value in scored),
        logprobs=None if scored is None else [_logprobs(token, value, vocabulary) for token, value in scored],
        finish_reason=result.finish_reason,
        stop_reason=result.stop_reason,
    )


def _logprobs(token: int, value: TokenLogprob, vocabulary: Vocabulary | None) -> dict[int, Logprob]:
    found = {
        other: Logprob(logprob, rank, _text(other, vocabulary))
        for rank, (other, logprob) in enumerate(zip(value.top_ids, value.top_values, strict=True), start=1)
    }
    found.setdefault(token, Logprob(value.sampled, None, _text(token, vocabulary)))
    return found


def _text(token: int, vocabulary: Vocabulary | None) -> str | None:
    return None if vocabulary is None else vocabulary.token_bytes(token).decode("utf-8", "replace")
