"""Reductions over the vocabulary in two levels: over chunks of a fixed size, then over their results.

They cost a fraction of the plain ones. Every row's result is a function of that row alone, for chunks are of
one size whatever the batch: a plain `sum` splits a lone long row over threads and rounds differently.
"""

from __future__ import annotations

from typing import Final

import torch

from services.engine.sampling.search import Search

# Of the largest values each chunk holds few, so small ones leave less to look at.
_CHUNK: Final = 64
_SMALL_CHUNK: Final = 16


def first_argmax(values: torch.Tensor) -> torch.Tensor:
    """The first index of the largest value of each row [R, V], int64 [R]; NaN counts as the largest."""
    if values.shape[1] < 2 * _CHUNK:
        return values.argmax(-1)
    whole, rest = _split(values, _CHUNK)
    largest = torch.cat((whole.amax(-1), rest.amax(-1, keepdim=True)), dim=1)
    ids = _members(largest.argmax(-1, keepdim=True), values.shape[1])
    # Where the last chunk is short its last member repeats: the first of equals is meant.
    return pick(ids, values.gather(1, ids).argmax(-1, keepdim=True)).squeeze(1)


def largest(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest values of each row [R, V] from the best down, and their ids, int64.

    Which of several equal ones at the border are among them is undefined, but the same for equal rows.
    """
    columns = values.shape[1] // _SMALL_CHUNK
    if columns < 2 * count:
        best = values.topk(count, dim=-1)
        return best.values, best.indices
    # A chunk outside of the best `count` ones holds nothing that beats as many others. Chunks are taken
    # across: member j of chunk c is c + j * columns, which reads memory in order.
    across = values[:, : columns * _SMALL_CHUNK].view(-1, _SMALL_CHUNK, columns)
    chunks = across.amax(1).topk(count, dim=-1, sorted=False).indices
    members = torch.arange(_SMALL_CHUNK, device=values.device) * columns
    ids = (chunks.unsqueeze(2) + members).flatten(1)
    rest = torch.arange(columns * _SMALL_CHUNK, values.shape[1], device=values.device)
    ids = torch.cat((ids, rest.expand(values.shape[0], -1)), dim=1)
    best = values.gather(1, ids).topk(count, dim=-1)
    return best.values, pick(ids, best.indices)


def pick(ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The ids, int64 [D, W] below 2**31, at places int64 [D, N] of their rows.

    By way of int32: an HPU has no kernel that gathers int64, and would do it on the host.
    """
    return ids.to(torch.int32).gather(1, places).to(torch.int64)


def total(weights: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """The sum of each row [D, W], [D] of dtype `wide`."""
    return _sums(weights).cumsum(-1, dtype=wide)[:, -1]


def invert(weights: torch.Tensor, uniform: torch.Tensor, wide: torch.dtype, search: Search) -> torch.Tensor:
    """The index, int64 [D], at which the cumulative weight of a row [D, W] exceeds uniform [D] times its sum.

    An index without weight is never returned if the row has any.
    """
    if weights.shape[1] < 8 * _CHUNK:
        cumulative = weights.cumsum(-1, dtype=wide)
        return search.first_above(cumulative, uniform * cumulative[:, -1]).squeeze(1)
    cumulative = _sums(weights).cumsum(-1, dtype=wide)
    target = uniform * cumulative[:, -1]
    chunk = search.first_above(cumulative, target)
    before = cumulative.gather(1, (chunk - 1).clamp_min(0)).masked_fill(chunk == 0, 0.0).squeeze(1)
    ids = _members(chunk, weights.shape[1])
    places = chunk * _CHUNK + torch.arange(_CHUNK, device=weights.device)
    members = weights.gather(1, ids).masked_fill(places >= weights.shape[1], 0.0).cumsum(-1, dtype=wide)
    return pick(ids, search.first_above(members, (target - before).clamp_min(0))).squeeze(1)


def _split(values: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of whole chunks, [R, n, size], and of the rest, which has 1 to `size` values."""
    count = (values.shape[1] - 1) // size
    return values[:, : count * size].view(-1, count, size), values[:, count * size :]


def _sums(weights: torch.Tensor) -> torch.Tensor:
    if weights.shape[1] <= _CHUNK:
        return weights
    whole, rest = _split(weights, _CHUNK)
    # The rest in a running sum: a lone row of it would be a whole reduction.
    return torch.cat((whole.sum(-1), rest.cumsum(-1)[:, -1:]), dim=1)


def _members(chunk: torch.Tensor, width: int) -> torch.Tensor:
    """Ids of the members of chunks [R, 1], int64 [R, _CHUNK]; those past the end are the last."""
    places = chunk * _CHUNK + torch.arange(_CHUNK, device=chunk.device)
    return places.clamp_max(width - 1)
