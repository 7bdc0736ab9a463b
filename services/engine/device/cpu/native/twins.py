"""What the products' kernels compute, in plain torch: the same numbers, whatever the order in memory is.

Quantized weights and rows are equal to the kernels' to the bit, and so are products of int8 weights.
Others are equal within the rounding of float32 sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Inputs that share one scale in an int4 weight.
GROUP = 32

# Candidates of a group's scale: see packing_int4.cpp.
_REACHES = tuple(7.0 + 0.25 * step for step in range(9))


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
    """weight = whole * scale of the group.

    whole: float32 of -8 to 7 [outputs, groups, GROUP], scales: float32 that are brain floats
    [outputs, groups]; inputs: those beyond them are padding.
    """

    whole: torch.Tensor
    scales: torch.Tensor
    inputs: int

    def dequantized(self) -> torch.Tensor:
        return (self.whole * self.scales[..., None]).flatten(1)[:, : self.inputs]


def _inverses(most: torch.Tensor) -> torch.Tensor:
    return torch.where(most > 0, _divided(127.0, most), 0.0)


def _divided(number: float, by: torch.Tensor) -> torch.Tensor:
    """torch multiplies a number by the reciprocals, which rounds twice."""
    return torch.full_like(by, number) / by


def _largest(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitudes; NaN where a number is none or not finite. Without a loss: such scales say so."""
    most = x.abs().amax(1) if x.shape[1] else torch.zeros(x.shape[0])
    return torch.where(torch.isfinite(x).all(1), most, torch.nan)


def quantize_rows(x: torch.Tensor) -> QuantizedRows:
    """Rows float32 [rows, inputs] as bytes, each row with a scale of its own."""
    most = _largest(x)
    whole = torch.round(x * _inverses(most)[:, None]).nan_to_num()
    return QuantizedRows((whole + 128).to(torch.uint8), most / 127.0)


def quantize_int8(weight: torch.Tensor) -> Int8Weight:
    """A weight float32 [outputs, inputs] in bytes, symmetric, with a scale for each output."""
    most = _largest(weight)
    whole = torch.round(weight * _inverses(most)[:, None]).nan_to_num()
    return Int8Weight(whole.to(torch.int8), most / 127.0)


def quantize_int4(weight: torch.Tensor) -> Int4Weight:
    """A weight float32 [outputs, inputs] in 4 bits: of a few scales for each group the best.

    A scale is the least-squares fit to the whole weights that a candidate gives, rounded to a brain float.
    """
    outputs, inputs = weight.shape
    groups = -(-inputs // GROUP)
    padded = torch.zeros(outputs, groups * GROUP)
    padded[:, :inputs] = weight
    padded = padded.view(outputs, groups, GROUP)
    extreme = _first_largest(padded)
    best_whole, best_scale, least = (
        torch.zeros_like(padded),
        torch.zeros_like(extreme),
        torch.zeros_like(extreme),
    )
    for reach in _REACHES:
        inverse = torch.where(extreme == 0, 0.0, _divided(-reach, extreme))
        whole = torch.round(padded * inverse[..., None]).clamp(-8, 7)
        squares = _in_order(whole * whole)
        scale = torch.where(squares == 0, 0.0, _in_order(padded * whole) / squares)
        scale = scale.bfloat16().float()
        off = padded - scale[..., None] * whole
        error = _in_order(off * off)
        better = torch.ones_like(error, dtype=torch.bool) if reach == _REACHES[0] else error < least
        least = torch.where(better, error, least)
        best_scale = torch.where(better, scale, best_scale)
        best_whole = torch.where(better[..., None], whole, best_whole)
    strange = ~torch.isfinite(padded).all(2)
    return Int4Weight(best_whole, torch.where(strange, torch.nan, best_scale), inputs)


def _first_largest(groups: torch.Tensor) -> torch.Tensor:
    """The number of largest magnitude, with its sign; the first of several."""
    extreme = groups[..., 0]
    for i in range(1, GROUP):
        extreme = torch.where(groups[..., i].abs() > extreme.abs(), groups[..., i], extreme)
    return extreme


def _in_order(terms: torch.Tensor) -> torch.Tensor:
    """Sums over the last dimension from its start on: the order in which the kernels add."""
    total = torch.zeros(terms.shape[:-1])
    for i in range(terms.shape[-1]):
        total = total + terms[..., i]
    return total


def int8_product(rows: QuantizedRows, weight: Int8Weight) -> torch.Tensor:
    """float32 [rows, outputs]."""
    whole = (rows.bytes.to(torch.int64) - 128) @ weight.whole.to(torch.int64).T
    return whole.float() * (rows.scales[:, None] * weight.scales)


def int4_product(x: torch.Tensor, weight: Int4Weight) -> torch.Tensor:
    """float32 [rows, outputs] of rows that are rounded to brain floats; sums in float64."""
    return (x.bfloat16().double() @ weight.dequantized().double().T).float()


def bfloat16_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float32 [rows, outputs]; rows and weights are rounded to brain floats, sums are in float64."""
    return (x.bfloat16().double() @ weight.bfloat16().double().T).float()
