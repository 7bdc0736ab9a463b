"""`FusedSDPA` (gaudi-facts.md 3.4 and 4.5)."""

from __future__ import annotations

import math
from typing import Any

import torch

from services.engine.device.sim.fused.kernels import Window


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    softmax_mode: str,
    valid_seq_len: torch.Tensor | None,
    seq_padding_type: str,
    *more: Any,
) -> torch.Tensor:
    """The inference path: the grouped heads get a dimension of their own, then the kernel runs."""
    if valid_seq_len is not None and not is_causal:
        raise AssertionError(
            "Valid sequence length is supported only in inference with is_causal(triangular) mask case"
        )
    mode = softmax_mode.lower()
    if mode == "fp32" and q.dtype is not torch.bfloat16:
        raise AssertionError("softmax_mode = fp32 is supported only when q/k/v inputs are BF16")
    if attn_mask is not None and attn_mask.dim() == 2:
        attn_mask = attn_mask.expand(q.shape[0], *(1 for _ in q.shape[1:-2]), *attn_mask.shape)
    heads, kv_heads = q.shape[1], k.shape[1]
    grouped = q.dim() == 4 and kv_heads not in (heads, 1)
    if grouped:
        q = q.reshape(q.shape[0], kv_heads, heads // kv_heads, *q.shape[2:])
        k, v = k.unsqueeze(2), v.unsqueeze(2)
        if attn_mask is not None:
            shape = attn_mask.shape
            groups = kv_heads if shape[1] == heads else 1
            attn_mask = attn_mask.reshape(shape[0], groups, shape[1] // groups, *shape[2:])
    out: torch.Tensor = torch.ops.hpu.sdpa_recomp_fwd(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        1.0 / math.sqrt(q.shape[-1]) if scale is None else scale,
        is_causal,
        False,
        mode,
        valid_seq_len,
        seq_padding_type.lower(),
        *more,
    )[0]
    return out.flatten(1, 2) if grouped else out


class FusedSDPA(torch.autograd.Function):
    """The bridge's attention, up to software 1.22: no window and no sinks."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute_mode: bool | None = None,
        valid_seq_len: torch.Tensor | None = None,
        seq_padding_type: str = "left",
        return_dropout_mask: bool = False,
        return_attn_probs: bool = False,
    ) -> torch.Tensor:
        """q [batch, heads, Q, d], k and v [batch, kv_heads, K, d]. Returns [batch, heads, Q, dv].

        `recompute_mode` chooses between kernels of equal results. Raises AssertionError or RuntimeError for
        what the kernels refuse: `valid_seq_len` without is_causal or with a mask, a mask with is_causal.
        """
        _inference_only(q, k, v, return_dropout_mask, return_attn_probs)
        return _forward(
            q, k, v, attn_mask, dropout_p, is_causal, scale, softmax_mode, valid_seq_len, seq_padding_type
        )


class FusedSDPAWithWindow(torch.autograd.Function):
    """The bridge's attention from software 1.23 on."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute_mode: bool | None = None,
        valid_seq_len: torch.Tensor | None = None,
        seq_padding_type: str = "left",
        return_dropout_mask: bool = False,
        return_attn_probs: bool = False,
        window_size: Window = (-1, -1),
        sink: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Like `FusedSDPA`, with a window (left, right; -1 for any distance) and a sink logit per head."""
        _inference_only(q, k, v, return_dropout_mask, return_attn_probs)
        return _forward(
            q,
            k,
            v,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            softmax_mode,
            valid_seq_len,
            seq_padding_type,
            window_size,
            sink,
        )


def _inference_only(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_mask: bool, probabilities: bool
) -> None:
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise RuntimeError("the simulator's FusedSDPA is for inference: no input may require a gradient")
    if dropout_mask or probabilities:
        raise RuntimeError("the simulator's FusedSDPA returns neither a dropout mask nor probabilities")
