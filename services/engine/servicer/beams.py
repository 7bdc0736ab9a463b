"""Admission of beam searches, and their hypotheses on the way to a router."""

from __future__ import annotations

from catenary.v1 import common_pb2
from services.engine.domain import BeamOptions, FinishReason
from services.engine.link import CapacityFacts, HypothesisRow
from services.engine.servicer.inadmissible import Inadmissible
from services.engine.servicer.sampling import SequenceLimits

# Scores are divided by the length to this power: beyond it only the length would decide.
_MAX_LENGTH_PENALTY = 10.0


def resolve_beams(
    spec: common_pb2.SequenceSpec, capacity: CapacityFacts, limits: SequenceLimits, max_tokens: int
) -> BeamOptions | None:
    """What the spec's beam search asks for, None if it has none. Raises Inadmissible.

    `max_tokens`: tokens of a beam at the most.
    """
    if not spec.HasField("beam_search"):
        return None
    given = spec.beam_search
    _check(spec, capacity, limits)
    asked = spec.response.top_logprobs if spec.response.HasField("top_logprobs") else -1
    numbers = given.results * max_tokens * (1 if asked < 0 else 2 + 2 * asked)
    if numbers > limits.max_beam_numbers:
        raise Inadmissible(
            f"The hypotheses can come to {numbers} tokens, log probabilities and alternatives; at most "
            f"{limits.max_beam_numbers} are taken here (max-beam-numbers). Lower max_tokens.",
            "max_tokens",
        )
    return BeamOptions(given.width, given.length_penalty, given.early_stopping, given.results, asked)


def _check(spec: common_pb2.SequenceSpec, capacity: CapacityFacts, limits: SequenceLimits) -> None:
    given, most = spec.beam_search, min(limits.max_beam_width, capacity.max_running)
    if limits.max_beam_width == 0:
        raise Inadmissible(
            "This engine takes no beam search (max-beam-width is 0, or contiguous-kv is on).",
            "use_beam_search",
            common_pb2.ERROR_CODE_UNSUPPORTED,
        )
    if not 1 <= given.width <= most:
        raise Inadmissible(
            f"A beam search has 1 to {most} beams here (max-beam-width, max-num-seqs), not {given.width}.",
            "use_beam_search",
        )
    if not 1 <= given.results <= given.width:
        raise Inadmissible(
            f"A search of {given.width} beams reports 1 to as many, not {given.results}.", "use_beam_search"
        )
    # NaN is in no interval.
    if not -_MAX_LENGTH_PENALTY <= given.length_penalty <= _MAX_LENGTH_PENALTY:
        raise Inadmissible(
            f"length_penalty must be between -{_MAX_LENGTH_PENALTY:g} and {_MAX_LENGTH_PENALTY:g}.",
            "length_penalty",
        )
    if spec.HasField("constraint"):
        raise Inadmissible("A beam search cannot have a constraint.", "constraint")
    if spec.HasField("prompt_len") and spec.prompt_len != len(spec.token_ids):
        raise Inadmissible("A beam search emits nothing that it could be resumed with.", "prompt_len")


def hypothesis_of(row: HypothesisRow) -> common_pb2.Hypothesis:
    """A hypothesis as it is sent."""
    message = common_pb2.Hypothesis(
        token_ids=row.token_ids,
        score=row.score,
        reason=(
            common_pb2.FINISH_REASON_STOP
            if row.reason is FinishReason.STOP
            else common_pb2.FINISH_REASON_LENGTH
        ),
        stop_token_id=row.stop_token_id,
    )
    if row.sampled is not None:
        columns = common_pb2.LogprobColumns(
            rows=[0],
            sampled=row.sampled,
            top_counts=row.top_counts,
            top_ids=row.top_ids,
            top_logprobs=row.top_logprobs,
        )
        message.logprobs.CopyFrom(columns)
    return message
