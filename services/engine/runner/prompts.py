"""Log probabilities of prompt tokens: which hidden states of a prefill are scored against which tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.engine.runner.staging import Ints, StagingBuffer
from services.engine.sampling import unpack_prompt
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


@dataclass(frozen=True, slots=True)
class PromptRequests:
    """What a prefill's chunks ask for. picks, targets int64 [slices * rows], padded; `alternatives` at most.

    picks are flat indexes into the prefill's hidden states.
    """

    picks: torch.Tensor
    targets: torch.Tensor
    rows: int
    alternatives: int


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


def request_scores(
    chunks: Sequence[PrefillChunk], query: int, rows: int, staging: StagingBuffer
) -> PromptRequests | None:
    """Inputs for what `scored_places` finds."""
    places = scored_places(chunks, query)
    if places is None:
        return None
    total = len(places[0])
    padded = -(-total // rows) * rows
    for section, values in zip(staging.lay_out(padded, padded), places, strict=True):
        section[:total] = values
        section[total:] = 0
    most = max(chunk.sequence.params.sampling.prompt_logprobs for chunk in chunks)
    picks, targets = staging.send().tensors()
    return PromptRequests(picks, targets, rows, most)


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
