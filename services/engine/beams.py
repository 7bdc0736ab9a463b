"""Search by beams, by the rules of transformers' generate(num_beams=...) with its float32 sums. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Final, TypeAlias

import numpy as np

from services.engine.domain import BeamOptions, FinishReason

Candidate: TypeAlias = tuple[int, float]
"""A token id with the natural log probability that the search adds up."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A generated token with its log probability, and the best alternatives at its place."""

    token_id: int
    logprob: float
    top: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Trail:
    """A token and how it was reached; `before` is None for the first that was generated."""

    before: Trail | None
    token: ScoredToken

    def tokens(self) -> tuple[ScoredToken, ...]:
        """All tokens, from the first on."""
        backwards = [self.token]
        trail = self.before
        while trail is not None:
            backwards.append(trail.token)
            trail = trail.before
        return tuple(reversed(backwards))


# What is sent as float32 must not become infinite there.
_LARGEST: Final = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam that goes on: the index of the one it comes from, and its new token."""

    parent: int
    token_id: int


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished beam. Its last token is a stop token if `reason` is STOP."""

    tokens: tuple[ScoredToken, ...]
    score: float
    reason: FinishReason

    @property
    def stop_token_id(self) -> int | None:
        """The token that ended it, if one did."""
        return self.tokens[-1].token_id if self.reason is FinishReason.STOP else None


@dataclass(frozen=True, slots=True)
class _Running:
    sum: np.float32
    trail: Trail | None


@dataclass(frozen=True, slots=True)
class _Finished:
    score: float
    trail: Trail
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class _Ranked:
    sum: np.float32
    parent: int
    candidate: Candidate


class BeamSearch:
    """Begins with one beam, the prompt. `longest`: tokens that a beam has at the most.

    `alternatives`: how many are kept for each token, to be reported.
    """

    def __init__(
        self, options: BeamOptions, *, stop_ids: Collection[int], longest: int, alternatives: int = 0
    ) -> None:
        self._options = options
        self._stop_ids = stop_ids
        self._longest = longest
        self._alternatives = alternatives
        self._running = [_Running(np.float32(0.0), None)]
        self._finished: list[_Finished] = []
        self._length = 0

    def advance(self, candidates: Sequence[Sequence[Candidate]]) -> list[Continuation]:
        """Takes the best tokens after each running beam, and returns the beams that go on, best first.

        `candidates` has a list for each running beam, in their order, the best first: at least `width` that
        are no stop tokens, if there are so many, and all that are better than these. Values that are not
        finite count as not there. The search is over if it returns none.
        """
        self._length += 1
        ranked = sorted(
            (
                _Ranked(np.float32(beam.sum + np.float32(candidate[1])), parent, candidate)
                for parent, (beam, some) in enumerate(zip(self._running, candidates, strict=True))
                for candidate in some
                if isfinite(candidate[1])
            ),
            key=lambda one: -one.sum,
        )
        width, last = self._options.width, self._length >= self._longest
        tops = [tuple(some[: self._alternatives]) for some in candidates]
        finished = [one for one in ranked[:width] if last or self._stops(one)]
        going = [] if last else [one for one in ranked if not self._stops(one)][:width]
        self._finish([self._finished_by(one, tops) for one in finished])
        if not going or self._is_over(going[0].sum):
            return []
        self._running = [_Running(one.sum, self._trail(one, tops)) for one in going]
        return [Continuation(one.parent, one.candidate[0]) for one in going]

    def hypotheses(self) -> list[Hypothesis]:
        """The finished beams to report, best first."""
        best = self._finished[: self._options.results]
        return [Hypothesis(one.trail.tokens(), one.score, one.reason) for one in best]

    def _stops(self, one: _Ranked) -> bool:
        return one.candidate[0] in self._stop_ids

    def _finished_by(self, one: _Ranked, tops: list[tuple[Candidate, ...]]) -> _Finished:
        reason = FinishReason.STOP if self._stops(one) else FinishReason.LENGTH
        return _Finished(self._score(one.sum), self._trail(one, tops), reason)

    def _trail(self, one: _Ranked, tops: list[tuple[Candidate, ...]]) -> Trail:
        token = ScoredToken(*one.candidate, tops[one.parent])
        return Trail(self._running[one.parent].trail, token)

    def _score(self, total: np.float32) -> float:
        """A sum of log probabilities over the number of tokens to the power of the length penalty."""
        length: float = float(self._length) ** self._options.length_penalty
        score = float(total) / length
        return min(max(score, -_LARGEST), _LARGEST)

    def _finish(self, new: list[_Finished]) -> None:
        merged = sorted(self._finished + new, key=lambda one: -one.score)
        self._finished = merged[: self._options.width]

    def _is_over(self, best: np.float32) -> bool:
        """With as many finished beams as are wanted: whether the running ones can still displace one.

        As in transformers, the best of these is taken as if it ended here.
        """
        if len(self._finished) < self._options.width:
            return False
        return self._options.early_stopping or self._score(best) <= self._finished[-1].score
