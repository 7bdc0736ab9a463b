"""How places and thresholds are found in long rows: two ways with the same results.

By index is what a CPU does fastest. By comparison takes operations alone that every accelerator computes
natively and for which nothing but the inputs' shape matters: compare, select, add up. (Of what the first way
uses, HPUs have no searchsorted and no view of a float's bits.)
"""

from __future__ import annotations

from typing import Final, Protocol

import torch

# Scores of at most 0 are told apart by the 31 bits of their float32 magnitude, from the top: (shift, bits).
_LEVELS: Final = ((20, 11), (10, 10), (0, 10))

# The smallest normal float32, and the powers of two that lead from it beyond the largest one.
_TINY: Final = 2.0**-126
_EXPONENTS: Final = (64, 64, 64, 32, 16, 8, 4, 2, 1)
_FRACTION_BITS: Final = 23


class Search(Protocol):
    """Rows are [D, ...]; every row's result is a function of that row alone."""

    def first_above(self, cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The first index of each row [D, W] whose running sum exceeds the target [D], int64 [D, 1].

        The target may be rounded up to the sum or, where it comes from other sums, beyond: the last weight
        that counts is meant then.
        """

    def magnitudes(self, scores: torch.Tensor) -> torch.Tensor:
        """What `threshold` knows scores float32 [D, V] of at most 0 by: it rises as they fall."""

    def threshold(
        self, magnitudes: torch.Tensor, weights: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
        """The smallest magnitude [D] up to which the integer weights [D, V] add up to target [D]."""

    def first(self, marked: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Of the marked entries, bool [D, V], the first `count`, int64 [D, 1]."""


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
