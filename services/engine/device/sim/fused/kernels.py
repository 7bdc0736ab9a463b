"""The fused kernels of `torch.ops.hpu`, computed by plain torch on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

Window = Sequence[int]
"""(left, right): how far a query looks to either side, -1 for any distance."""

NOISE = -3.0
"""Stands where a kernel writes nothing useful: finite, as seen on cards, and wrong enough to be noticed."""


def require(condition: bool, message: str) -> None:
    """Raise RuntimeError, which is how the bridge refuses arguments."""
    if not condition:
        raise RuntimeError(message)


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


_VECTOR_BYTES = 256


def block_softmax(
    attn: torch.Tensor, block_bias: torch.Tensor, block_groups: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`torch.ops.hpu.block_softmax`: exponentials of each block's scores, their maxima and their sums.

    attn [J, kv_heads, heads per kv head, 1, block_size] (five dimensions, no other); bias broadcasts to it;
    groups [J], -1 for padding. Maxima and sums come flat, [J, rows rounded up to a vector of 256 bytes], as
    the bridge's output shapes say: only `block_softmax_adjustment` reads them. A padded block's scores are 0.
    """
    require(attn.dim() == 5, f"block_softmax: attn must be 5-dimensional, got {attn.dim()}")
    require(attn.dtype in (torch.float32, torch.bfloat16), f"block_softmax: no kernel for {attn.dtype}")
    require(block_bias.dtype is attn.dtype, "block_softmax: attn and block_bias must have one dtype")
    scores = attn.float() + block_bias.float()
    highest = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - highest)
    total = weights.sum(-1, keepdim=True)
    padded = (block_groups == -1).reshape(-1, 1, 1, 1, 1)
    weights = weights.masked_fill(padded, 0.0).to(attn.dtype)
    return weights, _flat(highest, padded, attn.dtype), _flat(total, padded, attn.dtype)


def _flat(values: torch.Tensor, padded: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    flat = values.masked_fill(padded, NOISE).flatten(1)
    vector = _VECTOR_BYTES // dtype.itemsize
    missing = -flat.shape[1] % vector
    return torch.nn.functional.pad(flat, (0, missing), value=NOISE).to(dtype)


def block_softmax_adjustment(
    block_maxes: torch.Tensor,
    block_sums: torch.Tensor,
    block_groups: torch.Tensor,
    batch_size: int,
    out_shape: list[int] | None = None,
) -> torch.Tensor:
    """`torch.ops.hpu.block_softmax_adjustment`: what each block's weights must be multiplied by.

    exp(own maximum - maximum of the group) / sum of the group, where a group is the blocks of one row of the
    batch. maxes and sums [J, kv_heads, heads per kv head, 1, 1], or as `block_softmax` gives them together
    with `out_shape`. A block of group -1 gets noise. One of a group beyond the batch is an error here: the
    kernel has no place for it, and what it does then is not told.
    """
    require(
        bool((block_groups < batch_size).all()),
        f"block_softmax_adjustment: a block belongs to no row of a batch of {batch_size}",
    )
    require(
        block_maxes.dtype is block_sums.dtype,
        "block_softmax_adjustment: block_maxes and block_sums must have one dtype",
    )
    require(
        out_shape is not None or block_maxes.dim() == 5,
        f"If no out_shape provided, block_maxes tensor must be 5-dimensional, got {block_maxes.dim()}",
    )
    shape = list(block_maxes.shape) if out_shape is None else list(out_shape)
    rows = math.prod(shape[1:])
    highest = block_maxes.float().flatten(1)[:, :rows]
    sums = block_sums.float().flatten(1)[:, :rows]
    adjusted = torch.full_like(highest, NOISE)
    for group in range(batch_size):
        own = block_groups == group
        if own.any():
            pivot = highest[own].amax(0)
            scaled = torch.exp(highest[own] - pivot)
            adjusted[own] = scaled / (sums[own] * scaled).sum(0)
    return adjusted.reshape(shape).to(block_maxes.dtype)


BLOCKWISE = 0
PAIRWISE = 1


def rms_norm(data_in: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`torch.ops.hpu.rms_norm`: x / sqrt(mean(x^2) + eps) * gamma, and the reciprocal root [..., 1].

    x must have three dimensions. Both results are of x's dtype, or float32 if gamma's differs.
    """
    require(data_in.dim() == 3, f"rms_norm: the input must be 3-dimensional, got {data_in.dim()}")
    dtype = data_in.dtype if data_in.dtype is gamma.dtype else torch.float32
    values = data_in.float()
    reciprocal = torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
    return (values * reciprocal * gamma.float()).to(dtype), reciprocal.to(dtype)


def rotary_pos_embedding(
    input: torch.Tensor,
    sin: torch.Tensor,
    cos: torch.Tensor,
    position_ids: torch.Tensor | None,
    offset: int,
    mode: int,
) -> torch.Tensor:
    """`torch.ops.hpu.rotary_pos_embedding`: x * cos + rotated(x) * sin, in the dtype of x.

    BLOCKWISE turns the halves of the last dimension (neox), PAIRWISE its neighbours (GPT-J). cos and sin
    broadcast to x over its full last dimension; with `position_ids` [batch, length] (BLOCKWISE alone) they
    are tables [1, 1, positions, d] and x is [batch, heads, length, d].
    """
    require(offset == 0, f"rotary_pos_embedding: the simulator knows no offset, got {offset}")
    require(mode in (BLOCKWISE, PAIRWISE), f"rotary_pos_embedding: unknown mode {mode}")
    require(
        input.dtype is sin.dtype is cos.dtype, "rotary_pos_embedding: input, sin and cos must have one dtype"
    )
    if position_ids is not None:
        require(mode == BLOCKWISE, "rotary_pos_embedding: position_ids go with BLOCKWISE")
        cos, sin = (table.squeeze(1).squeeze(0)[position_ids].unsqueeze(1) for table in (cos, sin))
    require(
        cos.shape[-1] == sin.shape[-1] == input.shape[-1],
        f"rotary_pos_embedding: cos and sin must cover all {input.shape[-1]} of a head's dimension",
    )
    if mode == BLOCKWISE:
        first, second = input.chunk(2, -1)
        rotated = torch.cat((-second, first), -1)
    else:
        rotated = torch.stack((-input[..., 1::2], input[..., ::2]), -1).flatten(-2)
    return input * cos + rotated * sin


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "relu": torch.nn.functional.relu,
}


def mixture_of_experts(
    hidden_states: torch.Tensor,
    expert_routing_table: torch.Tensor,
    router_weights: torch.Tensor,
    w1: Sequence[torch.Tensor],
    w2: Sequence[torch.Tensor],
    w3: Sequence[torch.Tensor],
    permuted_weights: bool,
    activation: str,
    experts_min: int,
    experts_max: int,
) -> torch.Tensor:
    """`torch.ops.hpu.mixture_of_experts`: sum over a token's experts of weight * (act(x w1) * (x w2)) w3.

    hidden_states [tokens, hidden]; routing table and weights [tokens, experts per token]; w1 and w2
    [hidden, inner] and w3 [inner, hidden], or transposed with `permuted_weights` (as nn.Linear keeps them).
    The lists hold the experts experts_min to experts_max, both included; others contribute nothing, so that
    cards can share the experts. Raises RuntimeError.
    """
    count = experts_max - experts_min + 1
    require(
        len(w1) == len(w2) == len(w3) == count,
        f"mixture_of_experts: experts {experts_min}..{experts_max} need {count} weights in each list",
    )
    require(activation in _ACTIVATIONS, f"mixture_of_experts: no activation {activation!r}")
    require(hidden_states.dim() == 2, "mixture_of_experts: hidden_states must be [tokens, hidden]")
    require(
        expert_routing_table.dtype in (torch.int32, torch.int64),
        "mixture_of_experts: expert_routing_table must hold integers",
    )
    require(
        all(one.dtype is hidden_states.dtype for one in (router_weights, *w1, *w2, *w3)),
        "mixture_of_experts: hidden_states, router_weights and the experts' weights must have one dtype",
    )
    act = _ACTIVATIONS[activation]
    out = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for index in range(count):
        chosen = expert_routing_table == experts_min + index
        weight = (router_weights.float() * chosen).sum(-1, keepdim=True)
        gate, up, down = (w.t() if permuted_weights else w for w in (w1[index], w2[index], w3[index]))
        inner = act(torch.matmul(hidden_states, gate)) * torch.matmul(hidden_states, up)
        out += torch.matmul(inner, down).float() * weight
    return out.to(hidden_states.dtype)


def mixture_of_experts_fused_weights(
    hidden_states: torch.Tensor,
    expert_routing_table: torch.Tensor,
    router_weights: torch.Tensor,
    w12: Sequence[torch.Tensor],
    w3: Sequence[torch.Tensor],
    permuted_weights: bool,
    activation: str,
    experts_min: int,
    experts_max: int,
) -> torch.Tensor:
    """`mixture_of_experts.fused_weights`: w12 joins w1 and w2 along their inner dimension, w1 first."""
    halves = [w.chunk(2, dim=0 if permuted_weights else 1) for w in w12]
    return mixture_of_experts(
        hidden_states,
        expert_routing_table,
        router_weights,
        [first for first, _ in halves],
        [second for _, second in halves],
        w3,
        permuted_weights,
        activation,
        experts_min,
        experts_max,
    )


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
