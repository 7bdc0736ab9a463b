"""When a sequence ends by itself."""

from __future__ import annotations

from services.engine.link import FinishReason
from services.engine.scheduler.sequence import Sequence


def finish_reason(sequence: Sequence) -> FinishReason | None:
    """Why a sequence ends with its last token, or None if it goes on.

    A stop id among the first `min_tokens` generated tokens does not end it; sampling masks it there anyway.
    Nor does one end a constrained text, of which it may be a part: its constraint tells.
    """
    length = len(sequence.token_ids)
    if sequence.constrained:
        return FinishReason.LENGTH if length >= sequence.longest else None
    if sequence.token_ids[-1] in sequence.params.stop_ids and not sequence.masks_stops(length - 1):
        return FinishReason.STOP
    return FinishReason.LENGTH if length >= sequence.longest else None
