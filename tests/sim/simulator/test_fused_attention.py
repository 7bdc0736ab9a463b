"""The simulated attention kernels against plain attention (gaudi-facts.md 3.3, 3.4 and 4.5)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as plain

from services.engine.device.sim.fused.kernels import (
    NOISE,
    block_softmax,
    block_softmax_adjustment,
    sdpa_recomp_fwd,
)

B, H, Q, D = 2, 4, 6, 8


def heads(seed: int, length: int = Q, count: int = H, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(B, count, length, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fused(*args: Any, causal: bool = False, **more: Any) -> torch.Tensor:
    q, k, v, mask = args
    valid, mode = more.get("valid"), more.get("mode", "none")
    window, sink = more.get("window", (-1, -1)), more.get("sink")
    return sdpa_recomp_fwd(
        q, k, v, mask, 0.0, D**-0.5, causal, False, mode, valid, more.get("padding", "right"), window, sink
    )[0]


def test_causal_with_valid_seq_len_leaves_noise_in_the_padding() -> None:
    q, k, v = heads(0), heads(1), heads(2)
    out = fused(q, k, v, None, causal=True, valid=torch.tensor([4, 6], dtype=torch.int32))
    expected = plain(q, k, v, is_causal=True)
    torch.testing.assert_close(out[1], expected[1])
    torch.testing.assert_close(out[0, :, :4], expected[0, :, :4])
    assert (out[0, :, 4:] == NOISE).all()


def test_left_padding_counts_from_the_end() -> None:
    q, k, v = heads(0), heads(1), heads(2)
    out = fused(q, k, v, None, causal=True, valid=torch.tensor([4, 6]), padding="left")
    torch.testing.assert_close(
        out[0, :, 2:], plain(q[:1, :, 2:], k[:1, :, 2:], v[:1, :, 2:], is_causal=True)[0]
    )
    assert (out[0, :, :2] == NOISE).all()


@pytest.mark.parametrize("kind", ["bool", "added"])
def test_mask(kind: str) -> None:
    q, k, v = heads(0), heads(1, 10), heads(2, 10)
    allowed = torch.ones(Q, 10, dtype=torch.bool).tril(4)[None, None]
    added = torch.zeros(1, 1, Q, 10).masked_fill(~allowed, -torch.inf)
    out = fused(q, k, v, allowed if kind == "bool" else added)
    torch.testing.assert_close(out, plain(q, k, v, attn_mask=allowed))


def test_grouped_heads_come_in_five_dimensions() -> None:
    q, k, v = heads(0), heads(1, count=2), heads(2, count=2)
    out = fused(q.unflatten(1, (2, 2)), k.unsqueeze(2), v.unsqueeze(2), None, causal=True)
    torch.testing.assert_close(out.flatten(1, 2), plain(q, k, v, is_causal=True, enable_gqa=True))
    with pytest.raises(RuntimeError, match="4 query heads over 2 key heads need 5-D tensors"):
        fused(q, k, v, None, causal=True)


def test_window_and_sink() -> None:
    q, k, v = heads(0), heads(1), heads(2)
    near = torch.ones(Q, Q, dtype=torch.bool).tril().triu(-2)
    torch.testing.assert_close(
        fused(q, k, v, None, causal=True, window=(2, 0)), plain(q, k, v, attn_mask=near)
    )
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0])
    scores = torch.matmul(q, k.mT) * D**-0.5 + torch.zeros(Q, Q).masked_fill(~near.tril(), -torch.inf)
    column = sink.view(1, H, 1, 1).expand(B, H, Q, 1)
    weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(
        fused(q, k, v, None, causal=True, window=(2, 0), sink=sink), torch.matmul(weights, v)
    )


def test_slices_can_be_joined_by_their_maxima_and_sums() -> None:
    q, k, v = heads(0), heads(1, 12), heads(2, 12)
    parts = [
        sdpa_recomp_fwd(q, k[:, :, s], v[:, :, s], None, 0.0, D**-0.5, False, True, "none", None, "right")[:3]
        for s in (slice(0, 5), slice(5, 12))
    ]
    pivot = torch.maximum(parts[0][1], parts[1][1])
    shares = [torch.exp(highest - pivot) / reciprocal for _, highest, reciprocal in parts]
    joined = sum(share * out for share, (out, _, _) in zip(shares, parts, strict=True)) / sum(shares)
    torch.testing.assert_close(joined, plain(q, k, v))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"valid": torch.tensor([4, 6])}, "valid_seq_len needs is_causal and no attention mask"),
        ({"causal": True, "mask": True}, "is_causal and a mask exclude each other"),
        ({"causal": True, "mask": True, "valid": torch.tensor([4, 6])}, "and no attention mask"),
        ({"mode": "fp32"}, "only when q/k/v inputs are BF16"),
        ({"mode": "slow"}, "softmax_mode must be one of"),
        ({"causal": True, "length": 9}, "as many keys as queries, got 9 and 6"),
    ],
)
def test_refusals(arguments: dict[str, object], message: str) -> None:
    length = int(arguments.pop("length", Q))  # type: ignore[call-overload]
    mask = torch.zeros(1, 1, Q, Q) if arguments.pop("mask", False) else None
    with pytest.raises(RuntimeError, match=message):
        fused(heads(0), heads(1, length), heads(2, length), mask, **arguments)  # type: ignore[arg-type]


def test_fast_softmax_in_bfloat16_is_close() -> None:
    q, k, v = (heads(seed, dtype=torch.bfloat16) for seed in range(3))
    out = fused(q, k, v, None, causal=True, mode="fast")
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(
        out.float(), plain(q.float(), k.float(), v.float(), is_causal=True), atol=2e-2, rtol=2e-2
    )


def test_block_softmax_and_adjustment_make_a_softmax_over_each_row() -> None:
    scores = torch.randn(5, 2, 3, 1, 4, generator=torch.Generator().manual_seed(3))
    bias = torch.zeros(5, 1, 1, 1, 4)
    bias[2, ..., 2:] = -torch.inf
    groups = torch.tensor([0, 1, 0, -1, 1], dtype=torch.int32)
    weights, maxes, sums = block_softmax(scores, bias, groups)
    assert maxes.shape == sums.shape == (5, 64)
    assert (weights[3] == 0).all()
    rescale = block_softmax_adjustment(maxes, sums, groups, 2, [5, 2, 3, 1, 1])
    shares = weights * rescale
    for row, blocks in enumerate(([0, 2], [1, 4])):
        joined = torch.cat([(scores + bias)[block] for block in blocks], -1).softmax(-1)
        torch.testing.assert_close(torch.cat([shares[block] for block in blocks], -1), joined, msg=str(row))
    assert (rescale[3] == NOISE).all()


def test_block_softmax_needs_five_dimensions() -> None:
    with pytest.raises(RuntimeError, match="attn must be 5-dimensional, got 3"):
        block_softmax(torch.zeros(2, 3, 4), torch.zeros(2, 1, 4), torch.zeros(2, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="If no out_shape provided, block_maxes tensor must be 5-dim"):
        block_softmax_adjustment(torch.zeros(2, 64), torch.ones(2, 64), torch.zeros(2), 1)


@pytest.mark.parametrize("other", [0, 1, 2])
def test_queries_keys_and_values_have_one_dtype(other: int) -> None:
    tensors = [heads(seed) for seed in range(3)]
    tensors[other] = tensors[other].to(torch.bfloat16)
    with pytest.raises(RuntimeError, match="q, k and v must have one dtype"):
        fused(*tensors, None)


@pytest.mark.parametrize(("batch", "allowed"), [(3, True), (2, False), (1, False)])
def test_the_adjustment_knows_the_rows_of_its_batch_alone(batch: int, allowed: bool) -> None:
    """Where padding is a row, it is one of the batch."""
    scores = torch.randn(4, 2, 3, 1, 4, generator=torch.Generator().manual_seed(3))
    groups = torch.tensor([0, 1, 2, -1], dtype=torch.int32)
    _, maxes, sums = block_softmax(scores, torch.zeros(4, 1, 1, 1, 4), groups)
    shape = [4, 2, 3, 1, 1]
    if allowed:
        assert block_softmax_adjustment(maxes, sums, groups, batch, shape).isfinite().all()
    else:
        with pytest.raises(RuntimeError, match=f"belongs to no row of a batch of {batch}"):
            block_softmax_adjustment(maxes, sums, groups, batch, shape)
    with pytest.raises(RuntimeError, match="must have one dtype"):
        block_softmax_adjustment(maxes, sums.to(torch.bfloat16), groups, 3, shape)
