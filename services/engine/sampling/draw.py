"""Drawing tokens by inverse cumulative distribution. Every row's result is a function of that row alone.

The filters leave the tokens whose score reaches a threshold, so that equal tokens are treated alike: top-k
keeps all that are as good as the k-th (as transformers does), top-p all that are as good as the last one of
the nucleus. The exception is a row that wants exactly k.
"""

from __future__ import annotations

from typing import Final

import torch

from services.engine.device import Device
from services.engine.sampling.inputs import Draws, Filters
from services.engine.sampling.wide import draw_wide, invert

# What the filters leave of most rows is among so many candidates. The number is fixed, never taken from the
# batch, so that a row is treated alike whoever is beside it.
CANDIDATES: Final = 256


def draw_plain(scaled: torch.Tensor, draws: Draws, device: Device) -> torch.Tensor:
    """Draws int64 [D] from the whole distribution of scaled [D, V]."""
    return invert(torch.softmax(scaled, dim=-1), draws.uniform, device.wide_dtype)


def draw_filtered(scaled: torch.Tensor, draws: Draws, filters: Filters, device: Device) -> torch.Tensor:
    """Draws int64 [D] from the filtered distributions of scaled [D, V], whose best score is 0.

    A row whose candidates do not hold all that its filters leave is drawn again from the whole vocabulary.
    """
    probabilities = torch.softmax(scaled, dim=-1)
    tokens, sufficient = _draw_candidates(scaled, probabilities, draws, filters, device)
    again = device.rows_to_redo(~sufficient)
    if not again.shape[0]:
        return tokens
    redone = draw_wide(
        scaled.index_select(0, again),
        probabilities.index_select(0, again),
        filters.select(again),
        draws.uniform.index_select(0, again),
        device.wide_dtype,
    )
    known = tokens.index_select(0, again)
    return tokens.index_copy(0, again, torch.where(sufficient.index_select(0, again), known, redone))


def _draw_candidates(
    scaled: torch.Tensor, probabilities: torch.Tensor, draws: Draws, filters: Filters, device: Device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws among the best CANDIDATES tokens.

    Returns int64 [D] tokens, and bool [D]: no other token is left by the row's filters.
    """
    width = min(CANDIDATES, scaled.shape[1])
    scores, ids = scaled.topk(width, dim=-1)
    masses = probabilities.gather(1, ids).to(device.wide_dtype)
    off = filters.top_k == 0
    kept, closed = _best_k(scores, filters)
    weights = torch.where(kept, masses, 0.0)
    cumulative = weights.cumsum(-1)
    # The distribution's own sum is 1; of the k best it is what they weigh.
    needed = filters.top_p * torch.where(off, 1.0, cumulative[:, -1])
    # Position of the nucleus' last token.
    last = (cumulative < needed.unsqueeze(1)).sum(-1, keepdim=True).clamp_max(width - 1)
    border = torch.where(filters.top_p.unsqueeze(1) < 1, scores.gather(1, last), -torch.inf)
    reached = cumulative[:, -1] >= needed
    kept = kept & (scores >= border) & (masses >= filters.min_p.unsqueeze(1) * masses[:, :1])
    worst, worst_mass = scores[:, -1:], masses[:, -1:]
    in_nucleus = off & reached & (border > worst).squeeze(1)
    above_min_p = (off | closed) & (worst_mass < filters.min_p.unsqueeze(1) * masses[:, :1]).squeeze(1)
    sufficient = closed | in_nucleus | above_min_p
    if width == scaled.shape[1]:
        sufficient = sufficient | off | ~filters.exact
    picked = invert(torch.where(kept, masses, 0.0), draws.uniform, device.wide_dtype)
    return ids.gather(1, picked.unsqueeze(1)).squeeze(1), sufficient


def _best_k(scores: torch.Tensor, filters: Filters) -> tuple[torch.Tensor, torch.Tensor]:
    """Which sorted candidates [D, W] top-k keeps, and for which rows [D] it surely drops all the others."""
    width = scores.shape[1]
    off = filters.top_k == 0
    kth = scores.gather(1, (filters.top_k - 1).clamp(0, width - 1).unsqueeze(1))
    next_one = scores.gather(1, filters.top_k.clamp_max(width - 1).unsqueeze(1))
    kept = off.unsqueeze(1) | (scores >= kth)
    # Which of several equals at the border are among exactly k is told by their ids, which candidates are not
    # sorted by.
    border = torch.where(filters.exact.unsqueeze(1), next_one, scores[:, -1:])
    closed = ~off & (filters.top_k < width) & (kth > border).squeeze(1)
    return kept, closed
