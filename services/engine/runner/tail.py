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

    A prompt's first token has none. After a preemption the prompt is computed
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
    """Return the rows of logits that prompt tokens are scored with: one of the head's static counts."""
    return max(count for count in row_counts if count <= _MOST_ROWS)


def scored_tokens(chunk: PrefillChunk) -> int:
    """Return the number of prompt tokens that the chunk's hidden states score."""
    sequence = chunk.sequence
    if sequence.params.sampling.prompt_logprobs < 0:
        return 0
    return max(0, min(chunk.end, sequence.prompt_len - 1) - chunk.start)


def scored_places(chunks: Sequence[PrefillChunk], query: int) -> tuple[Ints, Ints] | None:
    """Return the places of scores in a prefill with `query` tokens a row, None if none are asked for.

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
    """Read the scores at `scored_places` from the rows of the packed result [total or more, 1 + 2 * n]."""
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
    """Results of a step on the host; None: it has no such part.

    harmless [rows]: whether each row of the prefill went well. prompts: packed scores of prompt tokens.
    samples: packed samples. Rows of padding may follow in each. best: in place of samples, the best tokens,
    int64 [rows], and their logits, where nothing else was asked for.
    """

    harmless: torch.Tensor | None
    prompts: torch.Tensor | None
    samples: torch.Tensor | None
    best: tuple[torch.Tensor, torch.Tensor] | None = None


class StepCopy(Protocol):
    """A copy that was begun."""

    def wait(self) -> StepParts:
        """Wait for its parts."""


class StepTail(Protocol):
    """One step's, with its inputs on the device. What is called runs where the device's work does."""

    @property
    def decoding(self) -> Forward | None:
        """The step's decode, prepared for its one tensor. None: `Phases.decode`."""

    def after_prefill(self, result: Any) -> None:
        """Take the result of the prefill's forward."""

    def restrict(self, masks: TokenMasks, buffer: MaskBuffer) -> None:
        """Take the masks of constrained rows, on the host, before `sample`. Only if `masked`.

        The masks are sent from the step's buffer.
        """

    def sample(self) -> None:
        """Sample, and keep the tokens for the next step."""

    def copy(self) -> StepCopy:
        """Begin the copy to the host."""


@dataclass(frozen=True, slots=True)
class TailRequest:
    """Demands of one step on its tail.

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
        """Device memory that it holds for good, in bytes."""

    def prepare(self, request: TailRequest) -> StepTail:
        """Lay out a step's inputs, on the host."""

    def dummy(self, phase: Phase, count: int) -> StepTail:
        """A tail whose `sample` runs one of the static shapes on padding alone."""


class NoTail:
    """The tail of a forward on padding, which has no results. Implements `StepTail`."""

    decoding = None

    def after_prefill(self, result: Any) -> None:
        return

    def restrict(self, masks: TokenMasks, buffer: MaskBuffer) -> None:
        raise ValueError("a forward on padding samples nothing")

    def sample(self) -> None:
        return

    def copy(self) -> StepCopy:
        raise ValueError("a forward on padding has nothing to tell")
