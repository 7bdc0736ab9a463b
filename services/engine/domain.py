"""Parameters and end reasons of a sequence, shared by scheduler, core, servicer and link.

They lie below the link, so that code which decides about sequences reaches no sockets.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from catenary.constraints import ConstraintKind


class SamplingOptions(Struct, frozen=True, array_like=True):
    """How the tokens of a sequence are chosen and what is reported of them. The defaults change nothing.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off. `logit_bias` pairs ids with what is added
    to their logits; `bad_words` are id sequences that are never completed; with `allowed_token_ids` no other
    id is sampled. `top_logprobs` and `prompt_logprobs` are numbers of alternatives: -1 reports nothing, 0 the
    token alone.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    top_logprobs: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int = -1
    keep_top_k_duplicates: bool = True


class PoolingOptions(Struct, frozen=True, array_like=True):
    """Asks for numbers in place of tokens: the vector of a document, the score of a pair, or the classes of
    either.

    `dimensions`: leading numbers of the vector to keep, scaled to length 1; 0: all as they are.
    `second_start`: index of the first token of the second of two texts; 0: one text. `raw`: vectors are not
    scaled to length 1, scores and classes are logits.
    """

    dimensions: int = 0
    second_start: int = 0
    raw: bool = False


class ConstraintOptions(Struct, frozen=True, array_like=True):
    """Rule for the generated text, from its first token on or behind the first `after` in it."""

    kind: ConstraintKind
    source: str
    after: str | None = None
    # As `closed_objects` of `catenary.v1.Constraint`.
    closed: bool = False


class BeamOptions(Struct, frozen=True, array_like=True):
    """Asks for a beam search in place of sampling.

    `width` beams; scores are sums of log probabilities over the number of tokens to the power of
    `length_penalty`; `early_stopping` ends the search with the first `width` finished beams, of which the
    best `results` are reported. `top_logprobs`: alternatives to report with each token, -1: nothing at all.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool = False
    results: int = 1
    top_logprobs: int = -1


class FinishReason(StrEnum):
    """Why a sequence ended; names are those of the contract's FinishReason without its prefix."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class CoreErrorCode(StrEnum):
    """Why the core failed a sequence; the contract's ErrorCode is "ERROR_CODE_" plus the value."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
    OVERLOADED = "OVERLOADED"
    INTERNAL = "INTERNAL"
