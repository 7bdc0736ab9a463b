"""Norms, rotations and experts in torch's own operations: the defaults of `Kernels`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import nn
from torch.nn.functional import gelu, silu
from torch.nn.functional import rms_norm as torch_rms_norm

Activation = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {"silu": silu, "gelu": gelu, "gelu_pytorch_tanh": partial(gelu, approximate="tanh")}
)


# Since torch 2.10; the vendor's images have older ones too.
_TORCH_GROUPED_MM: Callable[..., torch.Tensor] | None = getattr(nn.functional, "grouped_mm", None)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, unit_offset: bool) -> torch.Tensor:
    """Implement `Kernels.rms_norm`."""
    if unit_offset:
        wide = torch_rms_norm(x.float(), weight.shape, eps=eps)
        return (wide * (1.0 + weight.float())).to(x.dtype)
    return weight * torch_rms_norm(x, weight.shape, eps=eps)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Implement `Kernels.rotate`."""
    rotated = cos.shape[-1]
    if rotated == x.shape[-1]:
        return _rotate_all(x, cos, sin)
    return torch.cat((_rotate_all(x[..., :rotated], cos, sin), x[..., rotated:]), dim=-1)


def _rotate_all(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def grouped_mm(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """rows [S, in], of which group e has those from ends[e - 1] to ends[e]; weight [groups, in, out].

    Returns [S, out]: by torch's grouped kernel where this torch has one.
    """
    if _TORCH_GROUPED_MM is not None:
        return _TORCH_GROUPED_MM(rows, weight, offs=ends)
    return plain_grouped_mm(rows, weight, ends)


def plain_grouped_mm(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The same without the kernel: rows behind the last end are zero.

    On a CPU each group multiplies its own rows. Elsewhere, and in compiled code, it multiplies all of them,
    since to learn the ends would be to wait for the device.
    """
    out = rows.new_zeros((rows.shape[0], weight.shape[2]))
    if rows.device.type == "cpu" and not torch.compiler.is_compiling():
        start = 0
        for group, end in enumerate(ends.tolist()):
            if end > start:
                torch.matmul(rows[start:end], weight[group], out=out[start:end])
            start = end
        return out
    positions = torch.arange(rows.shape[0], device=rows.device).unsqueeze(1)
    # Backwards: a later, smaller end overwrites the rows that are not this group's.
    for group in range(weight.shape[0] - 1, -1, -1):
        out = torch.where(positions < ends[group], rows @ weight[group], out)
    return out


# An operator of its own: torch.compile knows the grouped product in bfloat16 alone.
@torch.library.custom_op("catenary::expert_linear", mutates_args=())
def expert_linear(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """rows [S, in] sorted by expert, weight [experts, out, in], ends int32 [experts] -> [S, out].

    Expert e has the rows up to ends[e] that no earlier one has.
    """
    return grouped_mm(rows, weight.transpose(1, 2), ends)


@expert_linear.register_fake
def _(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[1]))


def sorted_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """Implement `Kernels.experts`.

    The T * k pairs are sorted by expert, so that an expert's rows lie together whatever their number: no
    shape depends on the choice, no expert has a capacity, and only chosen experts are computed.
    """
    per_token = ids.shape[1]
    chosen, order = torch.sort(ids.flatten(), stable=True)
    bounds = torch.arange(gate_up.shape[0], device=x.device)
    ends = torch.searchsorted(chosen, bounds, right=True).to(torch.int32)
    rows = x.index_select(0, order // per_token)
    gate, up = expert_linear(rows, gate_up, ends).chunk(2, dim=-1)
    inner = ACTIVATIONS[activation](gate) * up
    results = expert_linear(inner, down, ends)
    results = results * weights.flatten().index_select(0, order).unsqueeze(1)
    back = torch.empty_like(results).index_copy_(0, order, results)
    total = back.view(-1, per_token, x.shape[1]).sum(1, dtype=torch.float32)
    return total.to(x.dtype)
