"""Exact drawing from the whole vocabulary, without a sort and in static shapes."""

from __future__ import annotations

from typing import Final

import torch

from services.engine.sampling.chunks import invert
from services.engine.sampling.inputs import Filters

# Scores of at most 0 are told apart by the 31 bits of their float32 magnitude, from the top: (shift, bits).
_LEVELS: Final = ((20, 11), (10, 10), (0, 10))

# Probabilities are added up as whole numbers: their sum is the same in whatever order it is made.
_INTEGERS: Final = {torch.float64: (torch.int64, 2.0**52), torch.float32: (torch.int32, 2.0**30)}


def draw_wide(
    scaled: torch.Tensor, filters: Filters, uniform: torch.Tensor, wide: torch.dtype
) -> torch.Tensor:
    """Draws int64 [D] from scaled float32 [D, V], whose best score is 0, by `filters`.

    The thresholds of top-k and top-p are found by histograms over the magnitudes of the scores, bits from the
    top down.
    """
    magnitudes = scaled.abs().view(torch.int32)
    probabilities = torch.softmax(scaled, dim=-1)
    integers, scale = _INTEGERS[wide]
    masses = (probabilities.to(wide) * scale).to(integers)
    kept = torch.ones_like(scaled, dtype=torch.bool)
    if filters.any_top_k:
        kept = _best_k(magnitudes, filters)
        masses = torch.where(kept, masses, 0)
    total = masses.sum(-1, dtype=integers)
    needed = (filters.top_p * total.to(wide)).ceil().to(integers).clamp_min(1)
    border = _threshold(magnitudes, masses, torch.minimum(needed, total))
    kept &= (magnitudes <= border.unsqueeze(1)) | (filters.top_p >= 1).unsqueeze(1)
    smallest = filters.min_p * probabilities.amax(-1).to(wide)
    kept &= probabilities.to(wide) >= smallest.unsqueeze(1)
    return invert(torch.where(kept, probabilities, 0.0), uniform, wide)


def _best_k(magnitudes: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Bool [D, V]: the tokens that top-k keeps."""
    ones = torch.ones_like(magnitudes)
    border = _threshold(magnitudes, ones, filters.top_k.to(torch.int32)).unsqueeze(1)
    off = (filters.top_k == 0).unsqueeze(1)
    if not filters.any_exact:
        return off | (magnitudes <= border)
    better, equal = magnitudes < border, magnitudes == border
    room = filters.top_k.unsqueeze(1) - better.sum(-1, keepdim=True)
    first = equal & (equal.cumsum(-1) <= room)
    return off | better | torch.where(filters.exact.unsqueeze(1), first, equal)


def _threshold(magnitudes: torch.Tensor, weights: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The smallest magnitude [D] up to which the integer weights [D, V] add up to target [D]."""
    found = torch.zeros_like(target, dtype=torch.int32)
    below = torch.zeros_like(target)
    for shift, bits in _LEVELS:
        digits = (magnitudes >> shift) & ((1 << bits) - 1)
        inside = (magnitudes >> (shift + bits)) == found.unsqueeze(1) if shift + bits < 31 else None
        counted = weights if inside is None else torch.where(inside, weights, 0)
        histogram = weights.new_zeros((weights.shape[0], 1 << bits))
        histogram.scatter_add_(1, digits.to(torch.int64), counted)
        cumulative = histogram.cumsum(-1, dtype=weights.dtype) + below.unsqueeze(1)
        digit = (cumulative < target.unsqueeze(1)).sum(-1, keepdim=True).clamp_max((1 << bits) - 1)
        before = cumulative.gather(1, (digit - 1).clamp_min(0)).squeeze(1)
        digit = digit.squeeze(1)
        below = torch.where(digit > 0, before, below)
        found = (found << bits) | digit.to(torch.int32)
    return found
