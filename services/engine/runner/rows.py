"""What sampling has to know about the rows of a step."""

from __future__ import annotations

from services.engine.sampling import RowParams, SequenceStates
from services.engine.scheduler import Sequence, StepPlan


def row_params(plan: StepPlan, states: SequenceStates) -> list[RowParams]:
    """Parameters of the sampling rows, in the order of `StepPlan.sampling()`."""

    rows: list[RowParams] = []
    for chunk in plan.prefills:
        if chunk.samples:
            # A prompt's tokens are all known; the newest of a decoding sequence may still be on the device.
            rows.append(_row(chunk.sequence, chunk.end, chunk.mask_stops, None, states))
    for one in plan.decodes:
        sequence = one.sequence
        pending_row = sequence.row if one.token is None else None
        rows.append(_row(sequence, one.position + 1, one.mask_stops, pending_row, states))
    return rows


def _row(
    sequence: Sequence, position: int, mask_stops: bool, pending_row: int | None, states: SequenceStates
) -> RowParams:
    params = sequence.params
    state = states.get(sequence.row, params.sampling, sequence.token_ids, sequence.prompt_len)
    masked = params.stop_ids if mask_stops and not sequence.constrained else ()
    return RowParams(state, position, masked, pending_row, sequence.group is not None)
