"""Draws of tokens by inverse cumulative distribution. Every row's result is a function of that row alone.

`IndexedSearch` is the fastest on a CPU. `ComparingSearch` uses operations alone that every accelerator
computes natively and whose cost follows from the inputs' shape: compare, select, add up. (HPUs have no
searchsorted and no view of a float's bits.)

Maxima and sums go by chunks, which costs a fraction of the plain operations. Chunks are of one size whatever
the batch: a plain `sum` splits a lone long row over threads and rounds differently.

The filters leave the tokens whose score reaches a threshold, so that equal tokens are treated alike: top-k
keeps all that are as good as the k-th (as transformers does), top-p all that are as good as the last one of
the nucleus. The exception is a row that wants exactly k.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch

# Scores of at most 0 are told apart by the 31 bits of their float32 magnitude, from the top: (shift, bits).
_LEVELS: Final = ((20, 11), (10, 10), (0, 10))

# The smallest normal float32, and the powers of two that lead from it beyond the largest one.
_TINY: Final = 2.0**-126
_EXPONENTS: Final = (64, 64, 64, 32, 16, 8, 4, 2, 1)
_FRACTION_BITS: Final = 23


@dataclass(frozen=True, slots=True)
class Filters:
    """Filters of drawn rows: top_k int64 [D], 0 off; exact bool [D]; top_p, min_p [D] wide, 1 and 0 off.

    exact: a row keeps top_k tokens and not those that equal the last of them. any_*: False: no row has it on.
    """

    top_k: torch.Tensor
    exact: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    any_top_k: bool = True
    any_exact: bool = True
    any_top_p: bool = True

    def select(self, index: torch.Tensor) -> Filters:
        """Return the filters of the rows `index`, int64 [N]."""
        return replace(
            self,
            top_k=self.top_k.index_select(0, index),
            exact=self.exact.index_select(0, index),
            top_p=self.top_p.index_select(0, index),
            min_p=self.min_p.index_select(0, index),
        )


def filters_of(
    ints: torch.Tensor, floats: torch.Tensor, *, any_top_k: bool, any_exact: bool, any_top_p: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Filters]:
    """Split inputs of `Stages.filter` into rows, temperature, uniform numbers, and filters."""
    index, top_k, exact = ints
    temperature, uniform, top_p, min_p = floats
    filters = Filters(top_k, exact == 1, top_p, min_p, any_top_k, any_exact, any_top_p)
    return index, temperature, uniform, filters


class Search(Protocol):
    """Rows are [D, ...]; every row's result is a function of that row alone."""

    def first_above(self, cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the first index of each row [D, W] whose sum so far exceeds the target [D], int64 [D, 1].

        The target may be rounded up to the sum or, where it comes from other sums, beyond: the last weight
        that counts is meant then.
        """

    def magnitudes(self, scores: torch.Tensor) -> torch.Tensor:
        """Return magnitudes of scores float32 [D, V] of at most 0: they rise as scores fall."""

    def threshold(
        self, magnitudes: torch.Tensor, weights: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
        """Return the smallest magnitude [D] up to which the integer weights [D, V] add up to target [D]."""

    def first(self, marked: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Return the first `count`, int64 [D, 1], of the marked entries, bool [D, V]."""


class IndexedSearch:
    """By binary search and histograms."""

    def first_above(self, cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        end = cumulative[:, -1:]
        target = torch.minimum(target.unsqueeze(1), torch.nextafter(end, torch.zeros_like(end)))
        return torch.searchsorted(cumulative, target, right=True).clamp_max(cumulative.shape[1] - 1)

    def magnitudes(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.abs().view(torch.int32)

    def threshold(
        self, magnitudes: torch.Tensor, weights: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
        # By histograms over the bits of the magnitudes, from the top down.
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

    def first(self, marked: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return marked & (marked.cumsum(-1) <= count)


class ComparingSearch:
    """By comparison and sum."""

    def first_above(self, cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        above = (cumulative <= target.unsqueeze(1)).sum(-1, keepdim=True)
        last = (cumulative < cumulative[:, -1:]).sum(-1, keepdim=True)
        return torch.minimum(above, last)

    def magnitudes(self, scores: torch.Tensor) -> torch.Tensor:
        # What is too small for a normal number is flushed to zero on some devices, so it is on all.
        found = scores.abs()
        return found.masked_fill(found < _TINY, 0.0)

    def threshold(
        self, magnitudes: torch.Tensor, weights: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
        # The largest number below which there is less than the target: its exponent, then its fraction. All
        # steps between floats are exact.
        def short(trial: torch.Tensor) -> torch.Tensor:
            inside = weights.masked_fill(magnitudes >= trial.unsqueeze(1), 0)
            return inside.sum(-1, dtype=weights.dtype) < target

        power = magnitudes.new_full((magnitudes.shape[0],), _TINY)
        normal = short(power)
        for step in _EXPONENTS:
            trial = power * 2.0**step
            power = torch.where(short(trial), trial, power)
        found = power
        for bit in range(1, _FRACTION_BITS + 1):
            trial = found + power * 2.0**-bit
            found = torch.where(short(trial), trial, found)
        return found.masked_fill(~normal, 0.0)

    def first(self, marked: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        # Numbers of entries below 2**24 are exact in float32, in whatever order they are added up.
        return marked & (marked.float().cumsum(-1) <= count)


# Of the largest values each chunk holds few, so small ones leave less to look at.
_CHUNK: Final = 64
_SMALL_CHUNK: Final = 16


def first_argmax(values: torch.Tensor) -> torch.Tensor:
    """Return the first index of each row's largest value [R, V], int64 [R]; NaN counts as the largest."""
    if values.shape[1] < 2 * _CHUNK:
        return values.argmax(-1)
    whole, rest = _split(values, _CHUNK)
    largest = torch.cat((whole.amax(-1), rest.amax(-1, keepdim=True)), dim=1)
    ids = _members(largest.argmax(-1, keepdim=True), values.shape[1])
    # Where the last chunk is short its last member repeats: the first of equals is meant.
    return pick(ids, values.gather(1, ids).argmax(-1, keepdim=True)).squeeze(1)


def largest(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` largest values of each row [R, V] from the best down, and their ids, int64.

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
    """Return the ids, int64 [D, W] below 2**31, at places int64 [D, N] of their rows.

    By way of int32: an HPU has no kernel that gathers int64, and would do it on the host.
    """
    return ids.to(torch.int32).gather(1, places).to(torch.int64)


def total(weights: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """Return the sum of each row [D, W], [D] of dtype `wide`."""
    return _sums(weights).cumsum(-1, dtype=wide)[:, -1]


def invert(weights: torch.Tensor, uniform: torch.Tensor, wide: torch.dtype, search: Search) -> torch.Tensor:
    """Return the index, int64 [D], where the sum so far of a row [D, W] exceeds uniform [D] times the whole.

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
    """Return views of whole chunks, [R, n, size], and of the rest, which has 1 to `size` values."""
    count = (values.shape[1] - 1) // size
    return values[:, : count * size].view(-1, count, size), values[:, count * size :]


def _sums(weights: torch.Tensor) -> torch.Tensor:
    if weights.shape[1] <= _CHUNK:
        return weights
    whole, rest = _split(weights, _CHUNK)
    # The rest in a running sum: a lone row of it would be a whole reduction.
    return torch.cat((whole.sum(-1), rest.cumsum(-1)[:, -1:]), dim=1)


def _members(chunk: torch.Tensor, width: int) -> torch.Tensor:
    """Return the ids of the members of chunks [R, 1], int64 [R, _CHUNK]; those past the end are the last."""
    places = chunk * _CHUNK + torch.arange(_CHUNK, device=chunk.device)
    return places.clamp_max(width - 1)


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
    """Draw int64 [D] from scaled float32 [D, V], whose best score is 0, by `filters`.

    kth float32 [D]: the score of the top_k-th best, where it is known; anything where top-k is off.
    """
    magnitudes = search.magnitudes(scaled)
    probabilities = torch.softmax(scaled, dim=-1)
    integers, scale = _INTEGERS[wide]
    masses = (probabilities.to(wide) * scale).to(integers)
    kept = torch.ones_like(scaled, dtype=torch.bool)
    if filters.any_top_k:
        kept = _best_k_of_all(magnitudes, filters, search, None if kth is None else search.magnitudes(kth))
        masses = masses.masked_fill(~kept, 0)
    total = masses.sum(-1, dtype=integers)
    needed = (filters.top_p * total.to(wide)).ceil().to(integers).clamp_min(1)
    border = search.threshold(magnitudes, masses, torch.minimum(needed, total))
    kept &= (magnitudes <= border.unsqueeze(1)) | (filters.top_p >= 1).unsqueeze(1)
    smallest = filters.min_p * probabilities.amax(-1).to(wide)
    kept &= probabilities.to(wide) >= smallest.unsqueeze(1)
    return invert(probabilities.masked_fill(~kept, 0.0), uniform, wide, search)


def _best_k_of_all(
    magnitudes: torch.Tensor, filters: Filters, search: Search, border: torch.Tensor | None
) -> torch.Tensor:
    """Return bool [D, V], the tokens that top-k keeps, up to the magnitude `border` [D] if that is known."""
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


# Filters leave tokens of most rows among so many candidates. The number is fixed, never taken from the batch:
# a row is drawn alike whatever its neighbours are.
CANDIDATES: Final = 256


def candidates(scaled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best CANDIDATES tokens of scaled [D, V], from the best down: scores and ids [D, W]."""
    return largest(scaled, min(CANDIDATES, scaled.shape[1]))


def draw_candidates(
    scaled: torch.Tensor,
    best: tuple[torch.Tensor, torch.Tensor],
    uniform: torch.Tensor,
    filters: Filters,
    wide: torch.dtype,
    search: Search,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw among the `candidates` of scaled [D, V], which is overwritten.

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
    """Return the sorted candidates [D, W] that top-k keeps, and the rows [D] that keep no others."""
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
