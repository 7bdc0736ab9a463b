"""Beam searches of a core: their sequences in the scheduler, and the choice of continuations.

Continuations are ranked by the rules of transformers' generate(num_beams=...), with its float32 sums.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from math import isfinite
from typing import Final, TypeAlias

import numpy as np
from msgspec.structs import replace

from catenary.sequence_limits import MAX_TOP_LOGPROBS
from services.engine.domain import BeamOptions, CoreErrorCode, FinishReason
from services.engine.link import HypothesisRow, SubmitSequence
from services.engine.sampling import SampledToken
from services.engine.scheduler import (
    BeamGroup,
    Scheduler,
    Sequence,
    SequenceParams,
    SequenceRefused,
    sequence_from,
)

Candidate: TypeAlias = tuple[int, float]
"""A token id with the natural log probability that the search adds up."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A generated token with its log probability, and the best alternatives at its place."""

    token_id: int
    logprob: float
    top: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class BeamPath:
    """A token and the path to it; `before` is None for the first generated token."""

    before: BeamPath | None
    token: ScoredToken

    def tokens(self) -> tuple[ScoredToken, ...]:
        """Return all tokens, from the first on."""
        backwards = [self.token]
        path = self.before
        while path is not None:
            backwards.append(path.token)
            path = path.before
        return tuple(reversed(backwards))


# Scores are sent as float32 and must not become infinite there.
_LARGEST: Final = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Continuation:
    """Next token of a beam: the index of the beam that it continues, and the token."""

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
        """Token that ended the beam, if one did."""
        return self.tokens[-1].token_id if self.reason is FinishReason.STOP else None


@dataclass(frozen=True, slots=True)
class _Running:
    sum: np.float32
    path: BeamPath | None


@dataclass(frozen=True, slots=True)
class _Finished:
    score: float
    path: BeamPath
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class _Ranked:
    sum: np.float32
    parent: int
    candidate: Candidate


class BeamSearch:
    """One search; it begins with one beam, the prompt. `longest`: most tokens of a beam.

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

    def advance(self, candidates: Items[Items[Candidate]]) -> list[Continuation]:
        """Take the best tokens after each running beam, and return the beams that go on, best first.

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
        self._running = [_Running(one.sum, self._path(one, tops)) for one in going]
        return [Continuation(one.parent, one.candidate[0]) for one in going]

    def hypotheses(self) -> list[Hypothesis]:
        """Return the finished beams to report, best first."""
        best = self._finished[: self._options.results]
        return [Hypothesis(one.path.tokens(), one.score, one.reason) for one in best]

    def _stops(self, one: _Ranked) -> bool:
        return one.candidate[0] in self._stop_ids

    def _finished_by(self, one: _Ranked, tops: list[tuple[Candidate, ...]]) -> _Finished:
        reason = FinishReason.STOP if self._stops(one) else FinishReason.LENGTH
        return _Finished(self._score(one.sum), self._path(one, tops), reason)

    def _path(self, one: _Ranked, tops: list[tuple[Candidate, ...]]) -> BeamPath:
        token = ScoredToken(*one.candidate, tops[one.parent])
        return BeamPath(self._running[one.parent].path, token)

    def _score(self, total: np.float32) -> float:
        """Return a sum of log probabilities over the number of tokens to the power of the length penalty."""
        length: float = float(self._length) ** self._options.length_penalty
        score = float(total) / length
        return min(max(score, -_LARGEST), _LARGEST)

    def _finish(self, new: list[_Finished]) -> None:
        merged = sorted(self._finished + new, key=lambda one: -one.score)
        self._finished = merged[: self._options.width]

    def _is_over(self, best: np.float32) -> bool:
        """Return whether no running beam can displace one of as many finished beams as are wanted.

        As in transformers, the best of these is taken as if it ended here.
        """
        if len(self._finished) < self._options.width:
            return False
        return self._options.early_stopping or self._score(best) <= self._finished[-1].score


@dataclass(slots=True)
class _Live:
    """A search. `candidates`: the best next tokens of each beam, by its key."""

    search: BeamSearch
    options: BeamOptions
    candidates: dict[int, tuple[Candidate, ...]] = field(default_factory=dict)


class BeamSearches:
    """Live searches by the keys of their leads. One decision costs a sort of the beams' best tokens."""

    def __init__(self, scheduler: Scheduler, eos_token_ids: Collection[int]) -> None:
        self._scheduler = scheduler
        self._eos_token_ids = eos_token_ids
        self._live: dict[int, _Live] = {}
        self._last_key = 0

    def __len__(self) -> int:
        """Number of searches that have not ended."""
        return len(self._live)

    def submit(self, message: SubmitSequence, options: BeamOptions) -> None:
        """Queue a search. Raises as `Scheduler.add_beams` does."""
        lead = sequence_from(message, self._eos_token_ids)
        # The search needs the best token and those behind it, whatever else the caller asks for.
        sampling = replace(message.sampling, temperature=0.0, top_logprobs=MAX_TOP_LOGPROBS)
        lead.params = replace_fields(lead.params, sampling=sampling)
        # One of them computes the prompt, and scores it if the caller asks for that.
        others = replace_fields(lead.params, sampling=replace(sampling, prompt_logprobs=-1))
        members = [lead, *(self._member(lead, others) for _ in range(options.width - 1))]
        self._scheduler.add_beams(members)
        search = BeamSearch(
            options,
            stop_ids=lead.params.stop_ids,
            longest=lead.longest - lead.prompt_len,
            alternatives=max(0, options.top_logprobs),
        )
        self._live[lead.key] = _Live(search, options)

    def note(self, beam: Sequence, group: BeamGroup, token: SampledToken) -> None:
        """Keep the best tokens after a beam. If there are none, the beam ends."""
        live = self._live.get(group.lead.key)
        if live is not None:
            live.candidates[beam.key] = token.top

    def advance(self, group: BeamGroup) -> list[HypothesisRow] | None:
        """Choose the next tokens of a group whose beams were all noted; return the hypotheses at the end."""
        live = self._live[group.lead.key]
        chosen = live.search.advance([live.candidates[beam.key] for beam in group.active])
        if not chosen:
            return [_row(one, live.options) for one in live.search.hypotheses()]
        self._scheduler.branch(group, [(group.active[one.parent], one.token_id) for one in chosen])
        return None

    def forget(self, key: int) -> None:
        """Drop the search of a sequence that ended, if it was one."""
        self._live.pop(key, None)

    def _member(self, lead: Sequence, params: SequenceParams) -> Sequence:
        # The servicer's keys are positive.
        self._last_key -= 1
        return Sequence(self._last_key, [], lead.prompt_len, params, lead.cache_salt)


def _row(hypothesis: Hypothesis, options: BeamOptions) -> HypothesisRow:
    tokens, reason = hypothesis.tokens, hypothesis.reason
    stopped = hypothesis.stop_token_id
    token_ids = [token.token_id for token in tokens]
    if options.top_logprobs < 0:
        return HypothesisRow(token_ids, hypothesis.score, reason, stopped)
    return HypothesisRow(
        token_ids,
        hypothesis.score,
        reason,
        stopped,
        sampled=[token.logprob for token in tokens],
        top_counts=[len(token.top) for token in tokens],
        top_ids=[token_id for token in tokens for token_id, _ in token.top],
        top_logprobs=[value for token in tokens for _, value in token.top],
    )


def check_beams(options: BeamOptions, message: SubmitSequence, max_width: int) -> None:
    """Raise SequenceRefused for a beam search that is malformed or wider than the engine takes."""
    if not 1 <= options.width <= max_width:
        raise _invalid(f"a search of {options.width} beams is outside 1 to {max_width} (max_beam_width)")
    if not 1 <= options.results <= options.width:
        raise _invalid(f"{options.results} results of {options.width} beams")
    if not isfinite(options.length_penalty):
        raise _invalid("length_penalty is not a number")
    if message.prompt_len != len(message.token_ids):
        raise _invalid("a beam search emits nothing that it could be resumed with")


def _invalid(text: str) -> SequenceRefused:
    return SequenceRefused(CoreErrorCode.INVALID_ARGUMENT, text)
