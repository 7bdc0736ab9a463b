"""The simulated experts, norm, rotary and FP8 kernels (gaudi-facts.md 4.5 and 5.3)."""

from __future__ import annotations

import pytest
import torch

from services.engine.device.sim.fused.kernels import (
    BLOCKWISE,
    PAIRWISE,
    cast_from_fp8,
    cast_to_fp8_v2,
    fp8_gemm_v2,
    mixture_of_experts,
    mixture_of_experts_fused_weights,
    rms_norm,
    rotary_pos_embedding,
)
from services.engine.device.sim.fused.library import existing_ops

E4M3 = torch.float8_e4m3fn


def expert_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[list[torch.Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(5, 8, generator=generator)
    weights, table = torch.randn(5, 4, generator=generator).softmax(-1).topk(2, -1)
    shapes = ((8, 6), (8, 6), (6, 8))
    lists = [[torch.randn(shape, generator=generator) for _ in range(4)] for shape in shapes]
    return tokens, table, weights, lists


def test_experts_add_up() -> None:
    tokens, table, weights, (w1, w2, w3) = expert_inputs()
    expected = torch.zeros(5, 8)
    for token in range(5):
        for expert, weight in zip(table[token].tolist(), weights[token], strict=True):
            gate = torch.nn.functional.silu(tokens[token] @ w1[expert])
            expected[token] += weight * ((gate * (tokens[token] @ w2[expert])) @ w3[expert])
    out = mixture_of_experts(tokens, table, weights, w1, w2, w3, False, "silu", 0, 3)
    torch.testing.assert_close(out, expected)


def test_experts_can_be_shared_and_joined_and_transposed() -> None:
    tokens, table, weights, lists = expert_inputs()
    w1, w2, w3 = ([w.t() for w in each] for each in lists)
    whole = mixture_of_experts(tokens, table, weights, w1, w2, w3, True, "silu", 0, 3)
    w12 = [torch.cat(pair, 0) for pair in zip(w1, w2, strict=True)]
    halves = [
        mixture_of_experts_fused_weights(
            tokens, table, weights, w12[low : high + 1], w3[low : high + 1], True, "silu", low, high
        )
        for low, high in ((0, 1), (2, 3))
    ]
    torch.testing.assert_close(halves[0] + halves[1], whole)
    with pytest.raises(RuntimeError, match=r"experts 0\.\.3 need 4 weights in each list"):
        mixture_of_experts_fused_weights(tokens, table, weights, w12[:2], w3[:2], True, "silu", 0, 3)


def test_experts_have_the_dtype_of_the_tokens() -> None:
    tokens, table, weights, (w1, w2, w3) = expert_inputs()
    half = torch.bfloat16
    for mixed in (
        (tokens, weights.to(half), w1),
        (tokens.to(half), weights, w1),
        (tokens, weights, [w1[0].to(half), *w1[1:]]),
    ):
        with pytest.raises(RuntimeError, match="must have one dtype"):
            mixture_of_experts(mixed[0], table, mixed[1], mixed[2], w2, w3, False, "silu", 0, 3)


def test_rms_norm_takes_three_dimensions() -> None:
    x, gamma = torch.randn(2, 3, 8), torch.rand(8)
    torch.testing.assert_close(
        rms_norm(x, gamma, 1e-5)[0], torch.nn.functional.rms_norm(x, (8,), gamma, 1e-5)
    )
    assert rms_norm(x.bfloat16(), gamma, 1e-5)[0].dtype is torch.float32
    with pytest.raises(RuntimeError, match="must be 3-dimensional, got 2"):
        rms_norm(x[0], gamma, 1e-5)


def test_rotary_modes() -> None:
    x = torch.randn(2, 3, 1, 4)
    angle = torch.rand(1, 3, 1, 2)
    first, second = x[..., :2], x[..., 2:]
    halves = torch.cat(
        (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1
    )
    twice = torch.cat((angle, angle), -1)
    torch.testing.assert_close(rotary_pos_embedding(x, twice.sin(), twice.cos(), None, 0, BLOCKWISE), halves)
    even, odd = x[..., ::2], x[..., 1::2]
    pairs = torch.stack(
        (even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin()), -1
    ).flatten(-2)
    each = angle.repeat_interleave(2, -1)
    torch.testing.assert_close(rotary_pos_embedding(x, each.sin(), each.cos(), None, 0, PAIRWISE), pairs)
    with pytest.raises(RuntimeError, match="must cover all 4"):
        rotary_pos_embedding(x, angle.sin(), angle.cos(), None, 0, BLOCKWISE)


def test_fp8_saturates_where_the_device_does() -> None:
    values = torch.tensor([1.0, -300.0, 1000.0])
    for device, largest in (("gaudi2", 240.0), ("gaudi3", 448.0)):
        cast, amax = cast_to_fp8_v2(values, 1.0, True, E4M3, device)
        assert cast.float().tolist() == [1.0, max(-288.0, -largest), largest]
        assert amax.item() == 1000.0
    assert cast_to_fp8_v2(values, 0.125, False, E4M3, "gaudi2")[0].float()[2] == 128.0
    # OCP weights that nobody converted hold values that Gaudi2 cannot read.
    wide = torch.tensor([400.0]).to(E4M3)
    assert cast_from_fp8(wide, 1.0, torch.bfloat16, "gaudi2").isnan().all()
    assert cast_from_fp8(wide, 2.0, torch.float32, "gaudi3").item() == 768.0


def test_fp8_product_dequantises_by_rows_and_columns() -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(3, 8, generator=generator), torch.randn(5, 8, generator=generator)
    rows, columns = a.abs().amax(1, keepdim=True) / 240, b.abs().amax(1) / 240
    a8 = cast_to_fp8_v2(a, 1 / rows, False, E4M3, "gaudi2")[0]
    b8 = cast_to_fp8_v2(b, 1 / columns.unsqueeze(1), False, E4M3, "gaudi2")[0]
    bias = torch.ones(5)
    out = fp8_gemm_v2(a8, False, b8, True, None, torch.float32, rows, columns, bias, False, "gaudi2")
    torch.testing.assert_close(out, a @ b.t() + 1, atol=0.3, rtol=0.1)
    with pytest.raises(RuntimeError, match="D goes with accumulate"):
        fp8_gemm_v2(a8, False, b8, True, None, torch.float32, rows, columns, None, True, "gaudi2")


def test_which_ops_exist_depends_on_the_version() -> None:
    old, new = ({op.name for op in existing_ops(version)} for version in ((1, 21, 0), (1, 24, 0)))
    assert new - old == {"block_softmax", "block_softmax_adjustment"}
    assert "mixture_of_experts.fused_weights" not in {
        op.name for op in existing_ops((1, 24, 0), frozenset({"mixture_of_experts"}))
    }
    windowed = [
        "window_size" in next(op for op in existing_ops(version) if op.name == "sdpa_recomp_fwd").schema
        for version in ((1, 22, 2), (1, 23, 0))
    ]
    assert windowed == [False, True]
