"""What sampling takes and gives for each row of logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RowParams:
    """How one row is sampled. temperature 0 is greedy; top_k 0 and top_p 1 are off; top_logprobs -1 is none.

    `position` is the new token's index in its sequence. `masked_ids` cannot be sampled.
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int
    position: int
    masked_ids: frozenset[int] = frozenset()
    top_logprobs: int = -1

    @property
    def greedy(self) -> bool:
        """True if the best token is taken."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One row's result. `token_id` is None if its logits were not finite.

    `logprob` and `top` (ids with their log probabilities, best first) are of the model's own distribution,
    before temperature, filters and masks; `logprob` is None if the row did not ask.
    """

    token_id: int | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def unpack(host: torch.Tensor, rows: list[RowParams]) -> list[SampledToken]:
    """Reads the packed result that `sample` brought to the host: [R, 3] or [R, 3 + 2 * n], see `sample`."""
    width = (host.shape[1] - 3) // 2
    results: list[SampledToken] = []
    for values, row in zip(host.tolist(), rows, strict=True):
        if not values[1]:
            results.append(SampledToken(None))
            continue
        count = max(0, min(row.top_logprobs, width))
        ids, logprobs = values[3 : 3 + count], values[3 + width : 3 + width + count]
        results.append(
            SampledToken(
                token_id=int(values[0]),
                logprob=values[2] if row.top_logprobs >= 0 else None,
                top=tuple(zip(map(int, ids), logprobs, strict=True)),
            )
        )
    return results
