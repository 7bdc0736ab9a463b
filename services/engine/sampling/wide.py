"""Exact drawing from the whole vocabulary, without a sort and in static shapes."""

from __future__ import annotations

from typing import Final

import torch

from services.engine.sampling.chunks import invert
from services.engine.sampling.inputs import Filters
from services.engine.sampling.search import Search

# Probabilities are added up as whole numbers: their sum is the same in whatever order it is made.
_INTEGERS: Final = {torch.float64: (torch.int64, 2.0**52), torch.float32: (torch.int32, 2.0**30)}


def draw_wide(
    scaled: torch.Tensor,
    filters: Filters,
    uniform: torch.Tensor,
    wide: torch.dtype,
    search: Search,
    *,
    kth: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draws int64 [D] from scaled float32 [D, V], whose best score is 0, by `filters`.

    kth float32 [D]: the score of the top_k-th best, where it is known; anything where top-k is off.
    """
    magnitudes = search.magnitudes(scaled)
    probabilities = torch.softmax(scaled, dim=-1)
    integers, scale = _INTEGERS[wide]
    masses = (probabilities.to(wide) * scale).to(integers)
    kept = torch.ones_like(scaled, dtype=torch.bool)
    if filters.any_top_k:
        kept = _best_k(magnitudes, filters, search, None if kth is None else search.magnitudes(kth))
        masses = masses.masked_fill(~kept, 0)
    total = masses.sum(-1, dtype=integers)
    needed = (filters.top_p * total.to(wide)).ceil().to(integers).clamp_min(1)
    border = search.threshold(magnitudes, masses, torch.minimum(needed, total))
    kept &= (magnitudes <= border.unsqueeze(1)) | (filters.top_p >= 1).unsqueeze(1)
    smallest = filters.min_p * probabilities.amax(-1).to(wide)
    kept &= probabilities.to(wide) >= smallest.unsqueeze(1)
    return invert(probabilities.masked_fill(~kept, 0.0), uniform, wide, search)


def _best_k(
    magnitudes: torch.Tensor, filters: Filters, search: Search, border: torch.Tensor | None
) -> torch.Tensor:
    """Bool [D, V]: the tokens that top-k keeps, up to the magnitude `border` [D] if that is known."""
    if border is None:
        ones = torch.ones_like(magnitudes, dtype=torch.int32)
        border = search.threshold(magnitudes, ones, filters.top_k.to(torch.int32))
    border = border.unsqueeze(1)
    off = (filters.top_k == 0).unsqueeze(1)
    if not filters.any_exact:
        return off | (magnitudes <= border)
    better, equal = magnitudes < border, magnitudes == border
    room = filters.top_k.unsqueeze(1) - better.sum(-1, keepdim=True)
    first = search.first(equal, room)
    return off | better | torch.where(filters.exact.unsqueeze(1), first, equal)
