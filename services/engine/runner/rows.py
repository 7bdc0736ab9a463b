"""What sampling has to know about the rows of a step."""

from __future__ import annotations

from services.engine.sampling import RowParams, SequenceStates
from services.engine.scheduler import Sequence, StepPlan


def row_params(plan: StepPlan, states: SequenceStates) -> list[RowParams]:
    """Parameters of the sampling rows, in the order of `StepPlan.sampling()`."""

    def row(sequence: Sequence, position: int, mask_stops: bool, pending_row: int | None) -> RowParams:
        params = sequence.params
        state = states.get(sequence.row, params.sampling, sequence.token_ids, sequence.prompt_len)
        return RowParams(state, position, params.stop_ids if mask_stops else (), pending_row)

    # A prompt's tokens are all known; the newest of a decoding sequence may still be on the device.
    rows = [row(one.sequence, one.end, one.mask_stops, None) for one in plan.prefills if one.samples]
    for one in plan.decodes:
        pending_row = one.sequence.row if one.token is None else None
        rows.append(row(one.sequence, one.position + 1, one.mask_stops, pending_row))
    return rows
