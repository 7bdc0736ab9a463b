"""What an offline batch gives back, in the shapes of vLLM's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural-log probability of a token. `rank` counts from 1 for the most probable one; None: not known."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice.

    `token_ids` are all that were generated, the stop token included. `logprobs` has for each token that is
    shown those of it and of its best alternatives, by id; None: not asked for. `stop_reason` is the stop text
    or the id in `stop_token_ids` that ended it, None for the model's own end and for a limit.
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
    """A vector of length 1."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """What came of a document."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True
