"""When a sequence ends by itself."""

from __future__ import annotations

from services.engine.link import FinishReason
from services.engine.scheduler.sequence import Sequence


def finish_reason(sequence: Sequence, max_model_len: int) -> FinishReason | None:
    """Why a sequence ends with its last token, or None if it goes on.

    A stop id among the first `min_tokens` generated tokens does not end it; sampling masks it there anyway.
    """
    params, generated = sequence.params, sequence.num_generated_tokens
    if generated > params.min_tokens and sequence.token_ids[-1] in params.stop_ids:
        return FinishReason.STOP
    if generated >= params.max_tokens or len(sequence.token_ids) >= max_model_len:
        return FinishReason.LENGTH
    return None
