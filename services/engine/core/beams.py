"""The beam searches of a core: their sequences in the scheduler, and what comes of their steps."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from math import isfinite

from msgspec.structs import replace

from catenary.sequence_limits import MAX_TOP_LOGPROBS
from services.engine.beams import BeamSearch, Candidate, Hypothesis
from services.engine.domain import BeamOptions, CoreErrorCode
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


@dataclass(slots=True)
class _Live:
    """A search. `candidates`: the best next tokens of each beam, by its key."""

    search: BeamSearch
    options: BeamOptions
    candidates: dict[int, tuple[Candidate, ...]] = field(default_factory=dict)


class BeamSearches:
    """Every method is quick: one decision costs a sort of the beams' best tokens."""

    def __init__(self, scheduler: Scheduler, eos_token_ids: Collection[int]) -> None:
        self._scheduler = scheduler
        self._eos_token_ids = eos_token_ids
        self._live: dict[int, _Live] = {}
        self._last_key = 0

    def submit(self, message: SubmitSequence, options: BeamOptions) -> None:
        """Queues a search. Raises as `Scheduler.add_beams` does."""
        lead = sequence_from(message, self._eos_token_ids)
        # The best token and those behind it, whatever else was asked for.
        sampling = replace(message.sampling, temperature=0.0, top_logprobs=MAX_TOP_LOGPROBS)
        lead.params = replace_fields(lead.params, sampling=sampling)
        # The prompt is computed, and scored if anybody asks for that, by one of them.
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
        """Keeps the best tokens after a beam. There may be none: it ends then."""
        live = self._live.get(group.lead.key)
        if live is not None:
            live.candidates[beam.key] = token.top

    def advance(self, group: BeamGroup) -> list[HypothesisRow] | None:
        """Chooses the tokens of a group whose beams have all been noted; None if the search goes on."""
        live = self._live[group.lead.key]
        chosen = live.search.advance([live.candidates[beam.key] for beam in group.active])
        if not chosen:
            return [_row(one, live.options) for one in live.search.hypotheses()]
        self._scheduler.branch(group, [(group.active[one.parent], one.token_id) for one in chosen])
        return None

    def forget(self, key: int) -> None:
        """The sequence with this key has ended; it may have been a search."""
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
    """Raises SequenceRefused for a beam search that is malformed or wider than the engine takes."""
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
