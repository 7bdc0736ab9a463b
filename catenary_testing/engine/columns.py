"""Steps of the scripted engine as columns, with beams."""

from __future__ import annotations

from catenary_testing.engine.sequence import Drawn, ScriptedSequence
from catenary_testing.engine.tokens import best_alternatives, continuation, sampled_logprob
from services.engine.domain import CoreErrorCode, FinishReason
from services.engine.link import EndRow, HypothesisRow, OfferedKv, PromptColumns, StepColumns


def hypotheses_of(sequence: ScriptedSequence, reason: FinishReason) -> list[HypothesisRow]:
    """Return as many as were asked for, best first, of a sequence that has ended for this reason.

    One has the tokens that it would have sampled. The i-th of the others has as many, those of its seed plus
    i, which no rule speaks of, and ends by length.
    """
    beams, model, spec = sequence.spec.beams, sequence.model, sequence.spec
    if beams is None:
        return []
    avoid = {*model.eos_token_ids, *model.avoid, *spec.stop_token_ids}
    found = [_row(sequence, sequence.drawn, reason)]
    for number in range(1, beams.results):
        tokens = continuation(
            spec.token_ids,
            len(sequence.drawn),
            seed=spec.sampling.seed + number,
            vocab_size=model.vocab_size,
            avoid=avoid,
        )
        found.append(_row(sequence, [_drawn(sequence, *place) for place in enumerate(tokens)], None))
    return sorted(found, key=lambda one: -one.score)


def _drawn(sequence: ScriptedSequence, index: int, token: int) -> Drawn:
    position = sequence.spec.prompt_len + index
    wanted = max(0, sequence.spec.beams.top_logprobs if sequence.spec.beams else 0)
    tops = best_alternatives(token, position, wanted, sequence.model.vocab_size) if wanted else []
    return Drawn(token, sampled_logprob(token, position), tuple(tops))


def _row(sequence: ScriptedSequence, drawn: list[Drawn], reason: FinishReason | None) -> HypothesisRow:
    beams = sequence.spec.beams
    penalty = beams.length_penalty if beams else 0.0
    logged = beams is not None and beams.top_logprobs >= 0
    scores = [one.logprob for one in drawn]
    if not logged:
        scores = [sampled_logprob(one.token, sequence.spec.prompt_len + i) for i, one in enumerate(drawn)]
    tops = [alternative for one in drawn for alternative in one.alternatives]
    return HypothesisRow(
        token_ids=[one.token for one in drawn],
        score=sum(scores) / len(drawn) ** penalty,
        reason=reason or FinishReason.LENGTH,
        stop_token_id=drawn[-1].token if reason is FinishReason.STOP else None,
        sampled=[one.logprob for one in drawn] if logged else None,
        top_counts=[len(one.alternatives) for one in drawn] if logged else None,
        top_ids=[token for token, _ in tops] if logged else None,
        top_logprobs=[value for _, value in tops] if logged else None,
    )


class Columns:
    """Rows of the step in the making; at most one row a sequence."""

    def __init__(self) -> None:
        self._rows: dict[int, Drawn | None] = {}
        self._logged: set[int] = set()
        self._prompts: dict[int, list[Drawn]] = {}
        self._ends: list[EndRow] = []
        self._progress = False

    @property
    def rows(self) -> bool:
        """Whether the step did anything: a token, an end, or a part of a prompt."""
        return bool(self._rows) or self._progress

    def quiet(self, sequence: ScriptedSequence) -> None:
        """Count a step that computed part of a prompt, without a row."""
        self._progress = True

    def token(self, sequence: ScriptedSequence, drawn: Drawn) -> None:
        """Add a token that was drawn. Those of a beam search are kept to its end."""
        if scores := sequence.prompt_scores():
            self._rows[sequence.spec.key] = None
            self._prompts[sequence.spec.key] = scores
        if sequence.spec.beams is not None:
            sequence.drawn.append(drawn)
            self._progress = True
            return
        self._rows[sequence.spec.key] = drawn
        if sequence.spec.sampling.top_logprobs >= 0:
            self._logged.add(sequence.spec.key)

    def end(
        self,
        sequence: ScriptedSequence,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        vector: bytes | None = None,
        offer: OfferedKv | None = None,
    ) -> None:
        """End the sequence with this step."""
        self._rows.setdefault(sequence.spec.key, None)
        failed = reason is FinishReason.ERROR
        well = reason in (FinishReason.STOP, FinishReason.LENGTH)
        found = hypotheses_of(sequence, reason) if well else []
        generated = sequence.generated
        if sequence.spec.beams is not None:
            generated = sum(len(one.token_ids) for one in found)
        self._ends.append(
            EndRow(
                row=list(self._rows).index(sequence.spec.key),
                reason=reason,
                stop_token_id=stop_token_id,
                error_code=CoreErrorCode.INTERNAL if failed else None,
                error_message="The scripted engine was told to fail this sequence." if failed else None,
                prompt_tokens=sequence.spec.prompt_len,
                cached_tokens=sequence.cached_tokens,
                completion_tokens=generated,
                vector=vector,
                hypotheses=found,
                transferred_tokens=sequence.transferred_tokens,
                kv_offer=offer,
            )
        )

    def build(self) -> StepColumns:
        drawn = list(self._rows.items())
        logged = [(row, d) for row, (key, d) in enumerate(drawn) if d is not None and key in self._logged]
        tops = [alternative for _, d in logged for alternative in d.alternatives]
        prompts = [(row, self._prompts[key]) for row, (key, _) in enumerate(drawn) if key in self._prompts]
        return StepColumns(
            prompts=_prompt_columns(prompts) if prompts else None,
            keys=[key for key, _ in drawn],
            token_counts=[int(d is not None) for _, d in drawn],
            token_ids=[d.token for _, d in drawn if d is not None],
            logprob_rows=[row for row, _ in logged],
            sampled=[d.logprob for _, d in logged],
            top_counts=[len(d.alternatives) for _, d in logged],
            top_ids=[token for token, _ in tops],
            top_logprobs=[value for _, value in tops],
            ends=self._ends,
        )


def _prompt_columns(prompts: list[tuple[int, list[Drawn]]]) -> PromptColumns:
    scores = [score for _, row in prompts for score in row]
    return PromptColumns(
        rows=[row for row, _ in prompts],
        counts=[len(row) for _, row in prompts],
        logprobs=[score.logprob for score in scores],
        top_counts=[len(score.alternatives) for score in scores],
        top_ids=[token for score in scores for token, _ in score.alternatives],
        top_logprobs=[value for score in scores for _, value in score.alternatives],
    )
