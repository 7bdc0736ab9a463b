"""The work of a step after its forwards: sampling, log probabilities of prompts, the copy of all results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from services.engine.device import Forward
from services.engine.graphs import Phase
from services.engine.runner.batches import Ints, Staged
from services.engine.sampling import MaskBuffer, RowParams, TokenMasks, unpack_prompt
from services.engine.scheduler import PrefillChunk
from services.engine.scheduler import Sequence as EngineSequence

# One static shape serves every prefill: logits of so many rows at once, however long the chunk is.
_MOST_ROWS = 64

TokenScore = tuple[float, tuple[tuple[int, float], ...]]
"""A token's log probability, and the best alternatives at its place with theirs."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of a sequence's prompt tokens from index `start` on, which is at least 1.

    Nothing comes before a prompt's first token, so that has none. After a preemption the prompt is computed
    and scored again.
    """

    sequence: EngineSequence
    start: int
    scores: tuple[TokenScore, ...]

    @property
    def finite(self) -> bool:
        """False if logits were not numbers. A log probability of minus infinity is one."""
        return not any(math.isnan(logprob) for logprob, _ in self.scores)


def slice_rows(row_counts: tuple[int, ...]) -> int:
    """Rows of logits that prompt tokens are scored with: one of the head's static counts."""
    return max(count for count in row_counts if count <= _MOST_ROWS)


def scored_tokens(chunk: PrefillChunk) -> int:
    """How many prompt tokens the chunk's hidden states predict, of a sequence that asks for their scores."""
    sequence = chunk.sequence
    if sequence.params.sampling.prompt_logprobs < 0:
        return 0
    return max(0, min(chunk.end, sequence.prompt_len - 1) - chunk.start)


def scored_places(chunks: Sequence[PrefillChunk], query: int) -> tuple[Ints, Ints] | None:
    """What these chunks of a prefill with `query` tokens a row predict, None if nothing that anyone asks for.

    int64 [N] each: flat indexes of hidden states, and the prompt tokens that come after them.
    """
    counts = [scored_tokens(chunk) for chunk in chunks]
    total = sum(counts)
    if not total:
        return None
    picks, targets = np.empty(total, dtype=np.int64), np.empty(total, dtype=np.int64)
    done = 0
    for row, (chunk, count) in enumerate(zip(chunks, counts, strict=True)):
        picks[done : done + count] = range(row * query, row * query + count)
        first = chunk.start + 1
        targets[done : done + count] = chunk.sequence.token_ids[first : first + count]
        done += count
    return picks, targets


def read_scores(host: torch.Tensor, chunks: Sequence[PrefillChunk]) -> tuple[PromptScores, ...]:
    """What `scored_places` found, from the rows of the packed result [total or more, 1 + 2 * n]."""
    results: list[PromptScores] = []
    done = 0
    for chunk in chunks:
        count = scored_tokens(chunk)
        if count:
            rows = host[done : done + count]
            scores = unpack_prompt(rows, chunk.sequence.params.sampling.prompt_logprobs)
            results.append(PromptScores(chunk.sequence, chunk.start + 1, tuple(scores)))
            done += count
    return tuple(results)


@dataclass(frozen=True, slots=True)
class StepParts:
    """What a step tells, on the host; None: it has no such part.

    harmless [rows]: whether each row of the prefill went well. prompts: packed scores of prompt tokens.
    samples: packed samples. Rows of padding may follow in each. best: in place of samples, the best tokens,
    int64 [rows], and their logits, where nothing else was wanted.
    """

    harmless: torch.Tensor | None
    prompts: torch.Tensor | None
    samples: torch.Tensor | None
    best: tuple[torch.Tensor, torch.Tensor] | None = None


class StepCopy(Protocol):
    """A copy that was begun."""

    def wait(self) -> StepParts:
        """Its parts, once they are there."""


class StepTail(Protocol):
    """One step's, with its inputs on the device. What is called runs where the device's work does."""

    @property
    def decoding(self) -> Forward | None:
        """What runs as the step's decode, prepared for what is in its one tensor. None: `Phases.decode`."""

    def after_prefill(self, result: Any) -> None:
        """Takes what the prefill's forward returned."""

    def restrict(self, masks: TokenMasks, buffer: MaskBuffer) -> None:
        """Takes what may follow in constrained rows, on the host, before `sample`. Only if `masked`.

        The masks are sent from the step's buffer.
        """

    def sample(self) -> None:
        """Samples, and keeps the tokens for the next step."""

    def copy(self) -> StepCopy:
        """Begins the copy to the host."""


@dataclass(frozen=True, slots=True)
class TailRequest:
    """What a step asks of its tail.

    prefills with `query` tokens a row in the forward; sampled rows, in the order of the hidden states, and
    their rows of the last tokens. `turn` is 0 or 1, for the steps that may be in flight. `masked`: the tail
    may be restricted before it samples. `decodes`: inputs of the decode, of a step that is nothing else.
    """

    prefills: Sequence[PrefillChunk]
    query: int
    sampled: list[RowParams]
    last_rows: list[int]
    turn: int
    masked: bool = False
    decodes: Staged | None = None


class Tails(Protocol):
    """Makes tails. Of static shapes it has `counts`, for each of its phases, which it can be asked to run."""

    @property
    def counts(self) -> Mapping[Phase, tuple[int, ...]]:
        """The static shapes that warm-up visits."""

    @property
    def prefill(self) -> Forward:
        """The forward of a prefill, whose result `after_prefill` wants."""

    @property
    def prefill_sampled(self) -> Forward:
        """The same for steps that score no tokens of prompts."""

    @property
    def bytes(self) -> int:
        """Device memory that it holds for good."""

    def prepare(self, request: TailRequest) -> StepTail:
        """Lays out a step's inputs, on the host."""

    def dummy(self, phase: Phase, count: int) -> StepTail:
        """A tail whose `sample` runs one of the static shapes on padding alone."""


class NoTail:
    """Of a forward on padding, from which nobody wants to know anything. Implements `StepTail`."""

    decoding = None

    def after_prefill(self, result: Any) -> None:
        return

    def restrict(self, masks: TokenMasks, buffer: MaskBuffer) -> None:
        raise ValueError("a forward on padding samples nothing")

    def sample(self) -> None:
        return

    def copy(self) -> StepCopy:
        raise ValueError("a forward on padding has nothing to tell")
