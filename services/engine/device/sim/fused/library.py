"""Register the fused kernels as `torch.ops.hpu.*`: their names, signatures, result shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from services.engine.device.sim.fused import kernels
from services.engine.device.sim.fused.kernels import require

_SDPA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? attention_mask, float p, float scale, bool is_causal, "
    "bool requires_backward, str softmax_mode, Tensor? valid_seq_len, str seq_padding_type{more}) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
_MOE = (
    "(Tensor hidden_states, Tensor expert_routing_table, Tensor router_weights, {weights}, "
    "bool permuted_weights, str activation, int experts_min, int experts_max) -> Tensor"
)
_TO_FP8 = (
    "(Tensor input, {scale}, bool stochastic_rounding=False, bool is_amax=False, "
    "ScalarType dtype=None, int[]? scale_shape=None) -> (Tensor, Tensor)"
)
_FROM_FP8 = "(Tensor input, {scale}, ScalarType out_dtype, int[]? scale_shape=None) -> Tensor"
_GEMM = (
    "(Tensor A, bool trans_A, Tensor B, bool trans_B, Tensor? D, ScalarType out_dtype, {scales}, "
    "Tensor? bias=None, bool accumulate=False, int[]? B_scale_shape=None) -> Tensor"
)


@dataclass(frozen=True, slots=True)
class FusedOp:
    """One overload. `since` is the first software version that has it, as far as is known."""

    name: str
    schema: str
    meta: Callable[..., Any]
    since: tuple[int, ...] = ()
    until: tuple[int, ...] | None = None


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    requires_backward = args[4]
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    if not requires_backward:
        return out, q.new_empty(0), q.new_empty(0, dtype=torch.float32), q.new_empty(0, dtype=torch.int32)
    coarse = args[5] == "fast" and q.dtype is torch.bfloat16
    one = (*q.shape[:-1], 1)
    reciprocal = q.new_empty(one, dtype=torch.bfloat16 if coarse else torch.float32)
    return out, q.new_empty(one), reciprocal, q.new_empty(1, dtype=torch.int32)


def _block_softmax(attn: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    vector = 256 // attn.dtype.itemsize
    rows = attn.shape[1] * attn.shape[2] * attn.shape[3]
    flat = (attn.shape[0], -(-rows // vector) * vector)
    return torch.empty_like(attn), attn.new_empty(flat), attn.new_empty(flat)


def _adjustment(
    maxes: torch.Tensor, sums: torch.Tensor, groups: torch.Tensor, batch: int, shape: list[int] | None = None
) -> torch.Tensor:
    return maxes.new_empty(maxes.shape if shape is None else shape)


def _like_first(first: torch.Tensor, *args: Any) -> torch.Tensor:
    return torch.empty_like(first)


def _rms_norm(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = x.dtype if x.dtype is gamma.dtype else torch.float32
    return torch.empty_like(x, dtype=dtype), x.new_empty((*x.shape[:-1], 1), dtype=dtype)


def _to_fp8(
    input: torch.Tensor,
    scale: Any = None,
    stochastic_rounding: bool = False,
    is_amax: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale_shape: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    amax = input.new_empty(() if is_amax else 0, dtype=torch.float32)
    return torch.empty_like(input, dtype=dtype), amax


def _from_fp8(
    input: torch.Tensor, scale: Any, out_dtype: torch.dtype, scale_shape: Any = None
) -> torch.Tensor:
    return torch.empty_like(input, dtype=out_dtype)


def _gemm(
    A: torch.Tensor, trans_A: bool, B: torch.Tensor, trans_B: bool, D: Any, out_dtype: torch.dtype, *rest: Any
) -> torch.Tensor:
    left, right = (A.mT if trans_A else A), (B.mT if trans_B else B)
    return torch.matmul(
        left.new_empty(left.shape, dtype=out_dtype), right.new_empty(right.shape, dtype=out_dtype)
    )


def _overloads(name: str, text: str, field: str, meta: Callable[..., Any]) -> list[FusedOp]:
    """The three ways in which the bridge takes scales: tensors, numbers, lists of numbers."""
    names = ["scale"] if field == "scale" else ["A_scale_inv", "B_scale_inv"]
    default = "=None" if name != "cast_from_fp8" else ""
    kinds = {"": ("Tensor?", default), ".scalar": ("float", ""), ".scalar_list": ("float[]", "")}
    return [
        FusedOp(
            name + suffix,
            text.format(**{field: ", ".join(f"{kind} {each}{end}" for each in names)}),
            meta,
        )
        for suffix, (kind, end) in kinds.items()
    ]


OPS: tuple[FusedOp, ...] = (
    FusedOp("sdpa_recomp_fwd", _SDPA.format(more=""), _sdpa, until=(1, 23)),
    FusedOp(
        "sdpa_recomp_fwd",
        _SDPA.format(more=", int[2] window_size=[-1, -1], Tensor? sink=None"),
        _sdpa,
        since=(1, 23),
    ),
    FusedOp(
        "block_softmax",
        "(Tensor attn, Tensor block_bias, Tensor block_groups) -> (Tensor, Tensor, Tensor)",
        _block_softmax,
        since=(1, 23),
    ),
    FusedOp(
        "block_softmax_adjustment",
        "(Tensor block_maxes, Tensor block_sums, Tensor block_groups, int batch_size, "
        "int[]? out_shape=None) -> Tensor",
        _adjustment,
        since=(1, 22),
    ),
    FusedOp("mixture_of_experts", _MOE.format(weights="Tensor[] w1, Tensor[] w2, Tensor[] w3"), _like_first),
    FusedOp(
        "mixture_of_experts.fused_weights", _MOE.format(weights="Tensor[] w12, Tensor[] w3"), _like_first
    ),
    FusedOp("rms_norm", "(Tensor data_in, Tensor gamma, float epsilon) -> (Tensor, Tensor)", _rms_norm),
    FusedOp(
        "rotary_pos_embedding",
        "(Tensor input, Tensor sin, Tensor cos, Tensor? position_ids, int offset, int mode) -> Tensor",
        _like_first,
    ),
    *_overloads("cast_to_fp8_v2", _TO_FP8, "scale", _to_fp8),
    *_overloads("cast_from_fp8", _FROM_FP8, "scale", _from_fp8),
    *_overloads("fp8_gemm_v2", _GEMM, "scales", _gemm),
)


def existing_ops(version: tuple[int, ...], missing: frozenset[str] = frozenset()) -> tuple[FusedOp, ...]:
    """The overloads that this software version has, without the ops named in `missing`."""
    return tuple(
        op
        for op in OPS
        if version >= op.since
        and (op.until is None or version < op.until)
        and op.name.partition(".")[0] not in missing
    )


Kernel = Callable[..., Any]

# The library that defines the ops, and for which software. It takes them away when it goes.
_defined: tuple[Any, tuple[Any, ...]] | None = None


def provide(version: tuple[int, ...], device: str, missing: frozenset[str]) -> dict[Any, Kernel]:
    """Define the ops that this software has, and take away those of another.

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
    computations: dict[str, Kernel] = {
        "sdpa_recomp_fwd": kernels.sdpa_recomp_fwd,
        "block_softmax": _gaudi3_only("block_softmax", device, kernels.block_softmax),
        "block_softmax_adjustment": _gaudi3_only(
            "block_softmax_adjustment", device, kernels.block_softmax_adjustment
        ),
        "mixture_of_experts": kernels.mixture_of_experts,
        "mixture_of_experts.fused_weights": kernels.mixture_of_experts_fused_weights,
        "rms_norm": kernels.rms_norm,
        "rotary_pos_embedding": kernels.rotary_pos_embedding,
    }
    for suffix in ("", ".scalar", ".scalar_list"):
        computations["cast_to_fp8_v2" + suffix] = _cast_to_fp8(device)
        computations["cast_from_fp8" + suffix] = _cast_from_fp8(device)
        computations["fp8_gemm_v2" + suffix] = _gemm_on(device)
    return computations


def _gaudi3_only(name: str, device: str, kernel: Kernel) -> Kernel:
    """gaudi-facts.md 3.3: the op is defined everywhere, Gaudi2's graph compiler has no kernel for it."""

    def compute(*args: Any, **kwargs: Any) -> Any:
        require(device == "gaudi3", f"Graph compile failed. synStatus=synStatus 26 [Generic failure]. {name}")
        return kernel(*args, **kwargs)

    return compute


def _cast_to_fp8(device: str) -> Kernel:
    def compute(
        input: torch.Tensor,
        scale: kernels.Scale = None,
        stochastic_rounding: bool = False,
        is_amax: bool = False,
        dtype: torch.dtype = torch.float8_e4m3fn,
        scale_shape: list[int] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        require(not stochastic_rounding, "cast_to_fp8_v2: the simulator does not round stochastically")
        require(scale_shape is None, "cast_to_fp8_v2: the simulator knows no scale_shape")
        return kernels.cast_to_fp8_v2(input, scale, is_amax, dtype, device)

    return compute


def _cast_from_fp8(device: str) -> Kernel:
    def compute(
        input: torch.Tensor,
        scale: kernels.Scale,
        out_dtype: torch.dtype,
        scale_shape: list[int] | None = None,
    ) -> torch.Tensor:
        require(scale_shape is None, "cast_from_fp8: the simulator knows no scale_shape")
        return kernels.cast_from_fp8(input, scale, out_dtype, device)

    return compute


def _gemm_on(device: str) -> Kernel:
    def compute(
        A: torch.Tensor,
        trans_A: bool,
        B: torch.Tensor,
        trans_B: bool,
        D: torch.Tensor | None,
        out_dtype: torch.dtype,
        A_scale_inv: kernels.Scale = None,
        B_scale_inv: kernels.Scale = None,
        bias: torch.Tensor | None = None,
        accumulate: bool = False,
        B_scale_shape: list[int] | None = None,
    ) -> torch.Tensor:
        require(B_scale_shape is None, "fp8_gemm_v2: the simulator knows no B_scale_shape")
        return kernels.fp8_gemm_v2(
            A, trans_A, B, trans_B, D, out_dtype, A_scale_inv, B_scale_inv, bias, accumulate, device
        )

    return compute
