"""FP8 casts and products, with each device's own range (gaudi-facts.md 4.5 and 5.3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.engine.device.sim.fused.rules import require

Scale = torch.Tensor | float | Sequence[float] | None
FULL_SCALE = {"gaudi2": 240.0, "gaudi3": 448.0}
"""Largest finite e4m3 value: Gaudi2 keeps the highest exponent code for infinities."""


def cast_to_fp8_v2(
    input: torch.Tensor,
    scale: Scale,
    is_amax: bool,
    dtype: torch.dtype,
    device: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`torch.ops.hpu.cast_to_fp8_v2`: input * scale, saturated to the device's range, and the largest input.

    The scale multiplies: pass the reciprocal of what a later cast back multiplies by.
    """
    largest = _largest(dtype, device)
    scaled = input.float() * _tensor(scale)
    amax = input.float().abs().amax() if is_amax else torch.empty(0)
    return scaled.clamp(-largest, largest).to(dtype), amax


def cast_from_fp8(input: torch.Tensor, scale: Scale, out_dtype: torch.dtype, device: str) -> torch.Tensor:
    """`torch.ops.hpu.cast_from_fp8`: the values times the scale. What the device cannot hold reads as NaN."""
    return (_values(input, device) * _tensor(scale)).to(out_dtype)


def fp8_gemm_v2(
    A: torch.Tensor,
    trans_A: bool,
    B: torch.Tensor,
    trans_B: bool,
    D: torch.Tensor | None,
    out_dtype: torch.dtype,
    A_scale_inv: Scale,
    B_scale_inv: Scale,
    bias: torch.Tensor | None,
    accumulate: bool,
    device: str,
) -> torch.Tensor:
    """`torch.ops.hpu.fp8_gemm_v2`: A B * A_scale_inv * B_scale_inv (+ bias) (+ D with `accumulate`).

    The scales are those that dequantise. They apply to the product: [rows, 1] or one number for A, [columns]
    or one number for B.
    """
    require(accumulate == (D is not None), "fp8_gemm_v2: D goes with accumulate=True")
    left = _values(A, device)
    right = _values(B, device)
    product = torch.matmul(left.mT if trans_A else left, right.mT if trans_B else right)
    product = product * _tensor(A_scale_inv) * _tensor(B_scale_inv)
    if bias is not None:
        product = product + bias.float()
    if D is not None:
        product = product + D.float()
    return product.to(out_dtype)


def _tensor(scale: Scale) -> torch.Tensor:
    if isinstance(scale, torch.Tensor):
        return scale.float()
    return torch.tensor(1.0 if scale is None else scale, dtype=torch.float32)


def _largest(dtype: torch.dtype, device: str) -> float:
    if dtype is torch.float8_e4m3fn:
        return FULL_SCALE[device]
    require(dtype is torch.float8_e5m2, f"an FP8 cast needs float8_e4m3fn or float8_e5m2, not {dtype}")
    return torch.finfo(dtype).max


def _values(tensor: torch.Tensor, device: str) -> torch.Tensor:
    largest = _largest(tensor.dtype, device)
    values = tensor.float()
    return values.masked_fill(values.abs() > largest, torch.nan)
