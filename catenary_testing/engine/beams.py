"""What a scripted engine answers to a beam search: its script, and continuations of other seeds beside it."""

from __future__ import annotations

from catenary_testing.engine.sequence import Drawn, ScriptedSequence
from catenary_testing.engine.tokens import best_alternatives, continuation, sampled_logprob
from services.engine.domain import FinishReason
from services.engine.link import HypothesisRow


def hypotheses_of(sequence: ScriptedSequence, reason: FinishReason) -> list[HypothesisRow]:
    """As many as were asked for, best first, of a sequence that has ended for this reason.

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
