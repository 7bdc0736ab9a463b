"""Reference of the products' kernels in plain torch: equal numbers, for any order in memory.

Quantized weights and rows are equal to the kernels' to the bit, and so are products of int8 weights.
Others are equal within the rounding of float32 sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Inputs that share a scale and an offset in an int4 weight.
GROUP = 32

# Candidates of a group's grid, step and middle: see packing_int4.cpp.
_GRIDS = (
    (0.066666667, -0.5),
    (0.071428571, -1.0),
    (0.076923077, -1.5),
    (0.062, -0.5),
    (0.0573, -0.5),
    (0.0533, -0.5),
)


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """x = (bytes - 128) * scales. bytes uint8 [rows, inputs], scales float32 [rows]."""

    bytes: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """weight = whole * scales. whole int8 [outputs, inputs], scales float32 [outputs]."""

    whole: torch.Tensor
    scales: torch.Tensor

    def dequantized(self) -> torch.Tensor:
        return self.whole.float() * self.scales[:, None]


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """weight = whole * scale + offset of the group.

    whole: float32 of -8 to 7 [outputs, groups, GROUP]; scales and offsets: float32 that are brain floats
    [outputs, groups]; inputs: those beyond them are padding.
    """

    whole: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor
    inputs: int

    def dequantized(self) -> torch.Tensor:
        """Return float64 [outputs, inputs]: a float32 does not hold every one of them."""
        weight = self.whole.double() * self.scales[..., None] + self.offsets[..., None]
        return weight.flatten(1)[:, : self.inputs]


def _inverses(most: torch.Tensor) -> torch.Tensor:
    return torch.where(most > 0, _divided(127.0, most), 0.0)


def _divided(number: float, by: torch.Tensor) -> torch.Tensor:
    """Divide exactly: torch multiplies by the reciprocals, which rounds twice."""
    return torch.full_like(by, number) / by


def _largest(x: torch.Tensor) -> torch.Tensor:
    """Return largest magnitudes; NaN where one is NaN or not finite. Without a loss: such scales say so."""
    most = x.abs().amax(1) if x.shape[1] else torch.zeros(x.shape[0])
    return torch.where(torch.isfinite(x).all(1), most, torch.nan)


def quantize_rows(x: torch.Tensor) -> QuantizedRows:
    """Quantize rows float32 [rows, inputs] to bytes, each row with a scale of its own."""
    most = _largest(x)
    whole = torch.round(x * _inverses(most)[:, None]).nan_to_num()
    return QuantizedRows((whole + 128).to(torch.uint8), most / 127.0)


def quantize_int8(weight: torch.Tensor) -> Int8Weight:
    """Quantize a weight float32 [outputs, inputs] to bytes, symmetric, with a scale for each output."""
    most = _largest(weight)
    whole = torch.round(weight * _inverses(most)[:, None]).nan_to_num()
    return Int8Weight(whole.to(torch.int8), most / 127.0)


def quantize_int4(weight: torch.Tensor) -> Int4Weight:
    """Quantize a weight float32 [outputs, inputs] to 4 bits: of a few grids for each group the best.

    Scale and offset are least-squares fits to whole weights, rounded to brain floats. Each candidate is
    fitted, and once more after its whole weights are rounded anew.
    """
    outputs, inputs = weight.shape
    groups = -(-inputs // GROUP)
    padded = torch.zeros(outputs, groups * GROUP)
    padded[:, :inputs] = weight
    padded = padded.view(outputs, groups, GROUP)
    least, most = padded.amin(2), padded.amax(2)
    middle = (least + most) * 0.5
    none = torch.zeros_like(least)
    best = _Grid(torch.zeros_like(padded), none, none, torch.full_like(none, torch.inf))
    for step, shift in _GRIDS:
        inverse = _inverse((most - least) * step)
        moved = (padded - middle[..., None]) * inverse[..., None] + shift
        grid = _fit(padded, torch.round(moved).clamp(-8, 7))
        best = best.or_better(grid)
        moved = (padded - grid.offset[..., None]) * _inverse(grid.scale)[..., None]
        best = best.or_better(_fit(padded, torch.round(moved).clamp(-8, 7)))
    strange = ~torch.isfinite(padded).all(2)
    return Int4Weight(best.whole, torch.where(strange, torch.nan, best.scale), best.offset, inputs)


@dataclass(frozen=True, slots=True)
class _Grid:
    whole: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor
    error: torch.Tensor

    def or_better(self, other: _Grid) -> _Grid:
        better = other.error < self.error
        return _Grid(
            torch.where(better[..., None], other.whole, self.whole),
            torch.where(better, other.scale, self.scale),
            torch.where(better, other.offset, self.offset),
            torch.where(better, other.error, self.error),
        )


def _fit(weight: torch.Tensor, whole: torch.Tensor) -> _Grid:
    total, wholes = _in_order(weight), _in_order(whole)
    spread = GROUP * _in_order(whole * whole) - wholes * wholes
    slope = (GROUP * _in_order(weight * whole) - wholes * total) / spread
    scale = torch.where(spread == 0, 0.0, slope).bfloat16().float()
    offset = ((total - scale * wholes) * (1 / GROUP)).bfloat16().float()
    off = weight - (scale[..., None] * whole + offset[..., None])
    return _Grid(whole, scale, offset, _in_order(off * off))


def _inverse(value: torch.Tensor) -> torch.Tensor:
    return torch.where(value == 0, 0.0, 1.0 / value)


def _in_order(terms: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension from its start on: the order in which the kernels add."""
    total = torch.zeros(terms.shape[:-1])
    for i in range(terms.shape[-1]):
        total = total + terms[..., i]
    return total


def int8_product(rows: QuantizedRows, weight: Int8Weight) -> torch.Tensor:
    """Return float32 [rows, outputs]."""
    whole = (rows.bytes.to(torch.int64) - 128) @ weight.whole.to(torch.int64).T
    return whole.float() * (rows.scales[:, None] * weight.scales)


def int4_product(x: torch.Tensor, weight: Int4Weight) -> torch.Tensor:
    """Return float32 [rows, outputs] of rows that are rounded to brain floats; sums in float64."""
    return (x.bfloat16().double() @ weight.dequantized().T).float()


def bfloat16_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return float32 [rows, outputs]; rows and weights are rounded to brain floats, sums are in float64."""
    return (x.bfloat16().double() @ weight.bfloat16().double().T).float()
