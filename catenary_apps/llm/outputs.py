"""What an offline batch gives back, in the shapes of vLLM's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


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
    """What came of a prompt.

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
    """How well two texts belong together."""

    score: float


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """The model's numbers for a document: float32, one dimension, on the CPU."""

    data: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Pooled:
    request_id: str
    prompt_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput(_Pooled):
    """What came of a document: its vector."""

    outputs: EmbeddingOutput
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ClassificationRequestOutput(_Pooled):
    """What came of a document: its classes."""

    outputs: ClassificationOutput
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput(_Pooled):
    """What came of a pair. `prompt_token_ids` are those of both texts."""

    outputs: ScoringOutput
    finished: bool = True


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput(_Pooled):
    """What came of a document."""

    outputs: PoolingOutput
    finished: bool = True


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
