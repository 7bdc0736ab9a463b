"""Scaled dot product attention with the rules of Habana's fused kernel (gaudi-facts.md 3.4 and 4.5)."""

from __future__ import annotations

import torch

from services.engine.device.sim.fused.rules import NOISE, Window, require

_MODES = ("none", "fast", "fp32")


def sdpa_recomp_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: torch.Tensor | None,
    p: float,
    scale: float,
    is_causal: bool,
    requires_backward: bool,
    softmax_mode: str,
    valid_seq_len: torch.Tensor | None,
    seq_padding_type: str,
    window_size: Window = (-1, -1),
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`torch.ops.hpu.sdpa_recomp_fwd` (gaudi-facts.md 4.5, low level).

    q [..., Q, d]; k [..., K, d]; v [..., K, dv]; the leading dimensions are [batch, heads], or
    [batch, groups, heads per group] with 1 as the keys' last one. attention_mask: bool, True where a query
    may look, or to be added. Returns the output [..., Q, dv] and, with `requires_backward`, the scores'
    maximum and the reciprocal of their sum [..., Q, 1] (otherwise empty), and a seed. Raises RuntimeError.
    """
    require(
        q.dtype is k.dtype is v.dtype,
        f"sdpa_recomp_fwd: q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}",
    )
    _check(q, k, attention_mask, p, is_causal, softmax_mode, valid_seq_len, seq_padding_type)
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * scale
    hidden = _hidden(scores, is_causal, valid_seq_len, seq_padding_type, window_size)
    if attention_mask is not None and attention_mask.dtype is torch.bool:
        hidden = hidden | ~attention_mask
    elif attention_mask is not None:
        scores = scores + attention_mask.float()
    scores = scores.masked_fill(hidden, -torch.inf)
    highest = scores.amax(-1, keepdim=True)
    if sink is not None:
        logits = sink.float().reshape(*q.shape[1:-2], 1, 1)
        highest = torch.maximum(highest, logits)
    # A row without a visible key is nobody's: it gets noise below, not a NaN from inf - inf.
    blind = highest == -torch.inf
    weights = torch.exp(scores - highest.masked_fill(blind, 0.0))
    if softmax_mode == "fast":
        weights = weights.to(q.dtype).float()
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(logits - highest)
    out = torch.matmul(weights, v.float()) / total
    out = out.masked_fill(blind, NOISE).masked_fill(_padding(q, valid_seq_len, seq_padding_type), NOISE)
    seed = torch.zeros(1 if requires_backward else 0, dtype=torch.int32)
    if not requires_backward:
        return out.to(q.dtype), q.new_empty(0), torch.empty(0), seed
    coarse = softmax_mode == "fast" and q.dtype is torch.bfloat16
    reciprocal = (1.0 / total).to(torch.bfloat16 if coarse else torch.float32)
    return out.to(q.dtype), highest.to(q.dtype), reciprocal, seed


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
    mode: str,
    valid: torch.Tensor | None,
    padding: str,
) -> None:
    require(dropout == 0.0, f"sdpa_recomp_fwd: the simulator has no dropout, got p={dropout}")
    require(mode in _MODES, f"sdpa_recomp_fwd: softmax_mode must be one of {_MODES}, not {mode!r}")
    require(
        mode != "fp32" or q.dtype is torch.bfloat16,
        "softmax_mode = fp32 is supported only when q/k/v inputs are BF16",
    )
    require(padding in ("left", "right"), f"sdpa_recomp_fwd: unknown seq_padding_type {padding!r}")
    require(
        k.shape[-3] in (1, q.shape[-3]),
        f"sdpa_recomp_fwd: {q.shape[-3]} query heads over {k.shape[-3]} key heads need 5-D tensors",
    )
    require(
        valid is None or (is_causal and mask is None),
        "sdpa_recomp_fwd: valid_seq_len needs is_causal and no attention mask",
    )
    require(not (is_causal and mask is not None), "sdpa_recomp_fwd: is_causal and a mask exclude each other")
    require(
        not is_causal or q.shape[-2] == k.shape[-2],
        f"sdpa_recomp_fwd: is_causal needs as many keys as queries, got {k.shape[-2]} and {q.shape[-2]}",
    )


def _hidden(
    scores: torch.Tensor,
    is_causal: bool,
    valid: torch.Tensor | None,
    padding: str,
    window: Window,
) -> torch.Tensor:
    """True where a query may not look because of its position. Broadcasts to the scores."""
    queries, keys = scores.shape[-2:]
    position = torch.arange(queries).unsqueeze(1) + (keys - queries)
    other = torch.arange(keys).unsqueeze(0)
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    if is_causal:
        hidden |= other > position
    left, right = window
    if left >= 0:
        hidden |= other < position - left
    if right >= 0:
        hidden |= other > position + right
    if valid is None:
        return hidden
    length = valid.long().reshape(-1, *(1 for _ in scores.shape[1:]))
    outside = other >= length if padding == "right" else other < keys - length
    return hidden | outside


def _padding(q: torch.Tensor, valid: torch.Tensor | None, padding: str) -> torch.Tensor:
    """True for the padded query rows, which the kernel skips: nobody knows what stands there."""
    queries = q.shape[-2]
    if valid is None:
        return torch.zeros(1, dtype=torch.bool)
    length = valid.long().reshape(-1, *(1 for _ in q.shape[1:]))
    row = torch.arange(queries).unsqueeze(1)
    return row >= length if padding == "right" else row < queries - length
