"""Registers the fused kernels as `torch.ops.hpu.*`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from services.engine.device.sim.fused import attention, block_softmax, elementwise, experts, fp8
from services.engine.device.sim.fused.rules import require
from services.engine.device.sim.fused.schemas import existing_ops

Kernel = Callable[..., Any]

# The library that defines the ops, and for which software. It takes them away when it goes.
_defined: tuple[Any, tuple[Any, ...]] | None = None


def provide(version: tuple[int, ...], device: str, missing: frozenset[str]) -> dict[Any, Kernel]:
    """Defines the ops that this software has, and takes away those of another.

    Returns the computation of each overload over host tensors. They are not registered as the ops' CPU
    kernels: a host tensor given to one of these ops is an error, as with the bridge.
    """
    global _defined
    existing = existing_ops(version, missing)
    if _defined is None or _defined[1] != existing:
        if _defined is not None:
            _defined[0]._destroy()
        untyped: Any = torch.library
        library = untyped.Library("hpu", "DEF")
        for op in existing:
            library.define(op.name + op.schema)
            library.impl(op.name, op.meta, "Meta")
        _defined = library, existing
    computations = _computations(device)
    return {_overload(op.name): computations[op.name] for op in existing}


def _overload(full_name: str) -> Any:
    name, _, overload = full_name.partition(".")
    return getattr(getattr(torch.ops.hpu, name), overload or "default")


def _computations(device: str) -> dict[str, Kernel]:
    kernels: dict[str, Kernel] = {
        "sdpa_recomp_fwd": attention.sdpa_recomp_fwd,
        "block_softmax": _gaudi3_only("block_softmax", device, block_softmax.block_softmax),
        "block_softmax_adjustment": _gaudi3_only(
            "block_softmax_adjustment", device, block_softmax.block_softmax_adjustment
        ),
        "mixture_of_experts": experts.mixture_of_experts,
        "mixture_of_experts.fused_weights": experts.mixture_of_experts_fused_weights,
        "rms_norm": elementwise.rms_norm,
        "rotary_pos_embedding": elementwise.rotary_pos_embedding,
    }
    for suffix in ("", ".scalar", ".scalar_list"):
        kernels["cast_to_fp8_v2" + suffix] = _cast_to_fp8(device)
        kernels["cast_from_fp8" + suffix] = _cast_from_fp8(device)
        kernels["fp8_gemm_v2" + suffix] = _gemm(device)
    return kernels


def _gaudi3_only(name: str, device: str, kernel: Kernel) -> Kernel:
    """gaudi-facts.md 3.3: the op is defined everywhere, Gaudi2's graph compiler has no kernel for it."""

    def compute(*args: Any, **kwargs: Any) -> Any:
        require(device == "gaudi3", f"Graph compile failed. synStatus=synStatus 26 [Generic failure]. {name}")
        return kernel(*args, **kwargs)

    return compute


def _cast_to_fp8(device: str) -> Kernel:
    def compute(
        input: torch.Tensor,
        scale: fp8.Scale = None,
        stochastic_rounding: bool = False,
        is_amax: bool = False,
        dtype: torch.dtype = torch.float8_e4m3fn,
        scale_shape: list[int] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        require(not stochastic_rounding, "cast_to_fp8_v2: the simulator does not round stochastically")
        require(scale_shape is None, "cast_to_fp8_v2: the simulator knows no scale_shape")
        return fp8.cast_to_fp8_v2(input, scale, is_amax, dtype, device)

    return compute


def _cast_from_fp8(device: str) -> Kernel:
    def compute(
        input: torch.Tensor, scale: fp8.Scale, out_dtype: torch.dtype, scale_shape: list[int] | None = None
    ) -> torch.Tensor:
        require(scale_shape is None, "cast_from_fp8: the simulator knows no scale_shape")
        return fp8.cast_from_fp8(input, scale, out_dtype, device)

    return compute


def _gemm(device: str) -> Kernel:
    def compute(
        A: torch.Tensor,
        trans_A: bool,
        B: torch.Tensor,
        trans_B: bool,
        D: torch.Tensor | None,
        out_dtype: torch.dtype,
        A_scale_inv: fp8.Scale = None,
        B_scale_inv: fp8.Scale = None,
        bias: torch.Tensor | None = None,
        accumulate: bool = False,
        B_scale_shape: list[int] | None = None,
    ) -> torch.Tensor:
        require(B_scale_shape is None, "fp8_gemm_v2: the simulator knows no B_scale_shape")
        return fp8.fp8_gemm_v2(
            A, trans_A, B, trans_B, D, out_dtype, A_scale_inv, B_scale_inv, bias, accumulate, device
        )

    return compute
