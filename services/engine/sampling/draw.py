"""Drawing tokens by inverse cumulative distribution. Every row's result is a function of that row alone.

The filters leave the tokens whose score reaches a threshold, so that equal tokens are treated alike: top-k
keeps all that are as good as the k-th (as transformers does), top-p all that are as good as the last one of
the nucleus. The exception is a row that wants exactly k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from services.engine.device import Device
from services.engine.sampling.chunks import invert, largest, pick, total
from services.engine.sampling.inputs import Draws, Filters
from services.engine.sampling.search import IndexedSearch, Search
from services.engine.sampling.wide import draw_wide

# What the filters leave of most rows is among so many candidates. The number is fixed, never taken from the
# batch, so that a row is treated alike whoever is beside it.
CANDIDATES: Final = 256

_SEARCH: Final = IndexedSearch()


@dataclass(frozen=True, slots=True)
class Scaled:
    """The rows that `draws` names of scores float32 [R, V], less their best score [R], by their temperature.

    What the methods return is new: the caller may change it in place, which is much cheaper than new memory.
    """

    scores: torch.Tensor
    best: torch.Tensor
    draws: Draws

    def all(self) -> torch.Tensor:
        """All of them, [D, V]."""
        if self.draws.every:
            return self._divided(self.scores - self.best.unsqueeze(1), self.draws.temperature)
        return self._of(self.draws.index, self.draws.temperature)

    def some(self, which: torch.Tensor) -> torch.Tensor:
        """Those of these indexes, int64 [N] into the draws, as [N, V]."""
        index = self.draws.index.index_select(0, which)
        return self._of(index, self.draws.temperature.index_select(0, which))

    def _of(self, index: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        chosen = self.scores.index_select(0, index)
        # Shifted first: the best score stays 0 however small the temperature is.
        chosen -= self.best.index_select(0, index).unsqueeze(1)
        return self._divided(chosen, temperature)

    @staticmethod
    def _divided(shifted: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        return shifted.div_(temperature.clamp_min(1e-30).unsqueeze(1))


def draw_plain(scaled: Scaled, device: Device) -> torch.Tensor:
    """Draws int64 [D] from the whole distributions."""
    return invert(scaled.all().exp_(), scaled.draws.uniform, device.wide_dtype, _SEARCH)


def draw_filtered(scaled: Scaled, filters: Filters, device: Device) -> torch.Tensor:
    """Draws int64 [D] from the filtered distributions.

    A row whose candidates do not hold all that its filters leave is drawn again from the whole vocabulary.
    """
    chosen = scaled.all()
    tokens, sufficient = draw_candidates(
        chosen, candidates(chosen), scaled.draws.uniform, filters, device.wide_dtype, _SEARCH
    )
    again = device.rows_to_redo(~sufficient)
    if not again.shape[0]:
        return tokens
    uniform = scaled.draws.uniform.index_select(0, again)
    redone = draw_wide(scaled.some(again), filters.select(again), uniform, device.wide_dtype, _SEARCH)
    known = tokens.index_select(0, again)
    return tokens.index_copy(0, again, torch.where(sufficient.index_select(0, again), known, redone))


def candidates(scaled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The best CANDIDATES tokens of scaled [D, V], from the best down: scores and ids [D, W]."""
    return largest(scaled, min(CANDIDATES, scaled.shape[1]))


def draw_candidates(
    scaled: torch.Tensor,
    best: tuple[torch.Tensor, torch.Tensor],
    uniform: torch.Tensor,
    filters: Filters,
    wide: torch.dtype,
    search: Search,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws among the `candidates` of scaled [D, V], which is overwritten.

    Returns int64 [D] tokens, and bool [D]: no other token is left by the row's filters.
    """
    scores, ids = best
    width = scores.shape[1]
    whole = width == scaled.shape[1]
    weights = scores.exp().to(wide)
    off = filters.top_k == 0
    kept, closed = _best_k(scores, filters)
    cumulative = weights.masked_fill(~kept, 0.0).cumsum(-1)
    sufficient = closed
    if filters.any_top_p:
        # top-p is a share of all weights, or of those that top-k keeps.
        needed = filters.top_p * torch.where(off, total(scaled.exp_(), wide), cumulative[:, -1])
        # Position of the nucleus' last token.
        last = (cumulative < needed.unsqueeze(1)).sum(-1, keepdim=True).clamp_max(width - 1)
        border = scores.gather(1, last).masked_fill(filters.top_p.unsqueeze(1) >= 1, -torch.inf)
        kept = kept & (scores >= border)
        reached = cumulative[:, -1] >= needed
        sufficient = sufficient | (off & reached & (border > scores[:, -1:]).squeeze(1))
    smallest = filters.min_p.unsqueeze(1) * weights[:, :1]
    kept = kept & (weights >= smallest)
    sufficient = sufficient | ((off | closed) & (weights[:, -1:] < smallest).squeeze(1))
    if whole:
        sufficient = sufficient | off | ~filters.exact
    picked = invert(weights.masked_fill(~kept, 0.0), uniform, wide, search)
    return pick(ids, picked.unsqueeze(1)).squeeze(1), sufficient


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
