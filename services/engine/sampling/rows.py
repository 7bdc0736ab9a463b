"""What sampling takes and gives for each row of logits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum

import torch

from services.engine.sampling.state import SequenceState

# Columns of a packed result before the ids and values of the alternatives.
PACKED_HEAD = 3


class RowStatus(IntEnum):
    """How a row came out; the numbers travel in the packed result."""

    NOT_FINITE = 0
    SAMPLED = 1
    NOTHING_LEFT = 2


@dataclass(slots=True)
class RowParams:
    """How one row is sampled in one step.

    `position` is the new token's index in its sequence. `masked_ids` cannot be sampled. `pending_row`: the
    sequence's newest token is not in `state.token_ids` yet; it is last_tokens[pending_row] on the device.
    """

    state: SequenceState
    position: int
    masked_ids: Collection[int] = ()
    pending_row: int | None = None


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One row's result. `token_id` is None unless `status` is SAMPLED.

    NOT_FINITE: a logit is NaN or positive infinity. NOTHING_LEFT: bans and allowed ids leave no token.
    `logprob` and `top` (ids with their log probabilities, best first) are of the model's own distribution,
    before bias, penalties, bans, temperature and filters; `logprob` is None if the row did not ask.
    """

    token_id: int | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    status: RowStatus = RowStatus.SAMPLED


def unpack(host: torch.Tensor, rows: list[RowParams]) -> list[SampledToken]:
    """Reads the packed result of a step, [R, 3 + 2 * n] with R at least the number of rows, on the host."""
    width = (host.shape[1] - PACKED_HEAD) // 2
    results: list[SampledToken] = []
    for values, row in zip(host[: len(rows)].tolist(), rows, strict=True):
        if values[1] != RowStatus.SAMPLED:
            results.append(SampledToken(None, status=RowStatus(int(values[1]))))
            continue
        asked = row.state.options.top_logprobs
        if asked < 0:
            results.append(SampledToken(int(values[0])))
            continue
        results.append(SampledToken(int(values[0]), values[2], best(values[PACKED_HEAD:], width, asked)))
    return results


def best(values: list[float], width: int, count: int) -> tuple[tuple[int, float], ...]:
    """The first `count` of `width` packed alternatives: ids, then as many log probabilities."""
    count = min(count, width)
    return tuple(zip(map(int, values[:count]), values[width : width + count], strict=True))
