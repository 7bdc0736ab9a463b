"""What sampling takes and gives for each row of logits."""

from __future__ import annotations

import math
from collections.abc import Collection
from enum import IntEnum

import torch
from msgspec import Struct

from services.engine.sampling.state import SequenceState

# Columns of a packed result before the ids and values of the alternatives.
PACKED_HEAD = 3


class RowStatus(IntEnum):
    """How a row came out; the numbers travel in the packed result."""

    NOT_FINITE = 0
    SAMPLED = 1
    NOTHING_LEFT = 2


# One of each exists for each row and step: a Struct is built several times as fast as a dataclass.
class RowParams(Struct, gc=False):
    """How one row is sampled in one step.

    `position` is the new token's index in its sequence. `masked_ids` cannot be sampled. `pending_row`: the
    sequence's newest token is not in `state.token_ids` yet; it is last_tokens[pending_row] on the device.
    `beam`: its best tokens are wanted by their log probabilities as penalties, biases and bans leave them.
    """

    state: SequenceState
    position: int
    masked_ids: Collection[int] = ()
    pending_row: int | None = None
    beam: bool = False


class SampledToken(Struct, frozen=True, gc=False):
    """One row's result. `token_id` is None unless `status` is SAMPLED.

    NOT_FINITE: a logit is NaN or positive infinity, or penalties made it so. NOTHING_LEFT: bans and allowed
    ids leave no token.
    `logprob` and `top` (ids with their log probabilities, best first) are of the model's own distribution,
    before bias, penalties, bans, temperature and filters; `logprob` is None if the row did not ask. Of a
    beam they are what bias, penalties and bans make of these log probabilities.
    """

    token_id: int | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    status: RowStatus = RowStatus.SAMPLED


def unpack(host: torch.Tensor, rows: list[RowParams]) -> list[SampledToken]:
    """Reads the packed result of a step, [R, 3 + 2 * n] with R at least the number of rows, on the host."""
    width = (host.shape[1] - PACKED_HEAD) // 2
    asked = [row.state.options.top_logprobs for row in rows]
    asking = [index for index, count in enumerate(asked) if count >= 0]
    # Only the rows that ask are read in full.
    details = iter(host[asking, PACKED_HEAD - 1 :].tolist())
    results: list[SampledToken] = []
    sampled = int(RowStatus.SAMPLED)
    for (token_id, status), count in zip(host[: len(rows), :2].long().tolist(), asked, strict=True):
        values = next(details) if count >= 0 else None
        if status != sampled:
            results.append(SampledToken(None, status=RowStatus(status)))
        elif values is None:
            results.append(SampledToken(token_id))
        else:
            results.append(SampledToken(token_id, values[0], best(values[1:], width, count)))
    return results


def read_best(tokens: torch.Tensor, logits: torch.Tensor) -> list[SampledToken]:
    """The results of rows that took the best of their logits, on the host: tokens int64 [R], logits [R]."""
    return [
        SampledToken(token) if -math.inf < logit < math.inf else SampledToken(None, status=_status(logit))
        for token, logit in zip(tokens.tolist(), logits.tolist(), strict=True)
    ]


def _status(best: float) -> RowStatus:
    """Why a row has no token whose best logit is not finite."""
    return RowStatus.NOTHING_LEFT if best == -math.inf else RowStatus.NOT_FINITE


def best(values: list[float], width: int, count: int) -> tuple[tuple[int, float], ...]:
    """The first `count` of `width` packed alternatives: ids, then as many log probabilities."""
    count = min(count, width)
    return tuple(zip(map(int, values[:count]), values[width : width + count], strict=True))
