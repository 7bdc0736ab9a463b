"""Drawing tokens by inverse cumulative distribution. Every row's result is a function of that row alone."""

from __future__ import annotations

import torch

# Most nuclei fit in so many candidates; a row whose does not is sorted whole. The number is fixed, never
# taken from the batch, so that a row is treated alike whoever is beside it.
CANDIDATES = 256


def draw(
    scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor, wide: torch.dtype
) -> torch.Tensor:
    """Draws one token for each row from its filtered distribution.

    scores float32 [R, V], divided by the temperature; top_k int64 [R], 0 for off; top_p [R] in (0, 1];
    uniform [R] in [0, 1), the last two of dtype `wide`. Returns int64 [R].
    """
    probabilities = torch.softmax(scores, dim=-1, dtype=wide)
    tokens = invert(probabilities, uniform)
    filtered = ((top_k > 0) | (top_p < 1)).nonzero().flatten()
    if not filtered.numel():
        return tokens
    width = min(CANDIDATES, scores.shape[1])
    subset = scores.index_select(0, filtered)
    masses = probabilities.index_select(0, filtered)
    limit, nucleus, chance = top_k[filtered], top_p[filtered], uniform[filtered]
    ids = subset.topk(width, dim=-1).indices
    best = masses.gather(1, ids)
    fits = ((limit > 0) & (limit <= width)) | ((limit == 0) & (best.cumsum(-1)[:, -1] >= nucleus))
    picked = _draw_sorted(ids, best, limit, nucleus, chance)
    rest = (~fits).nonzero().flatten()
    if rest.numel() and width < scores.shape[1]:
        ids = subset[rest].sort(dim=-1, descending=True, stable=True).indices
        best = masses[rest].gather(1, ids)
        picked[rest] = _draw_sorted(ids, best, limit[rest], nucleus[rest], chance[rest])
    tokens[filtered] = picked
    return tokens


def invert(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first index of each row [R, W] whose cumulative weight exceeds uniform [R] times the row's sum."""
    cumulative = probabilities.cumsum(-1)
    total = cumulative[:, -1:]
    # The product may round up to the total, which no index exceeds: the last weight that counts is meant
    # then.
    target = torch.minimum(uniform.unsqueeze(1) * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return index.clamp_max(probabilities.shape[1] - 1)


def _draw_sorted(
    ids: torch.Tensor,
    weights: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """ids [R, W] and their weights, best first. top-k cuts first; the nucleus is of what it leaves."""
    rank = torch.arange(ids.shape[1], device=ids.device)
    cut = (top_k.unsqueeze(1) > 0) & (rank >= top_k.unsqueeze(1))
    weights = weights.masked_fill(cut, 0.0)
    # A running sum, not `sum`: that one splits a lone long row over threads and rounds differently.
    cumulative = weights.cumsum(-1)
    mass = torch.where(top_k > 0, cumulative[:, -1], torch.ones_like(top_p))
    before = cumulative - weights
    outside = before >= (top_p * mass).unsqueeze(1)
    # The best token always stays: a tiny top_p is greedy.
    outside[:, 0] = False
    outside &= (top_p < 1).unsqueeze(1)
    chosen = invert(weights.masked_fill(outside, 0.0), uniform)
    return ids.gather(1, chosen.unsqueeze(1)).squeeze(1)
