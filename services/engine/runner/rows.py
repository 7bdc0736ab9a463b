"""What sampling has to know about the rows of a step."""

from __future__ import annotations

from services.engine.sampling import RowParams
from services.engine.scheduler import StepPlan


def row_params(plan: StepPlan) -> list[RowParams]:
    """Parameters of the sampling rows, in the order of `StepPlan.sampling()`."""
    ends = [(chunk.sequence, chunk.end, chunk.mask_stops) for chunk in plan.prefills if chunk.samples]
    ends += [(row.sequence, row.position + 1, row.mask_stops) for row in plan.decodes]
    rows: list[RowParams] = []
    for sequence, position, mask_stops in ends:
        sampling = sequence.params.sampling
        rows.append(
            RowParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=sampling.seed,
                position=position,
                masked_ids=sequence.params.stop_ids if mask_stops else frozenset(),
                top_logprobs=sampling.top_logprobs,
            )
        )
    return rows
