"""The vendor's Python interface to its fused kernels (gaudi-facts.md 4.5)."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("mask_heads", [None, 1, 4])
@torch.inference_mode()
def test_fused_sdpa_groups_heads_and_masks(new_card: Any, mask_heads: int | None) -> None:
    from habana_frameworks.torch.hpex.kernels import FusedSDPA

    new_card()
    q, k, v = tensors((2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8))
    mask = None
    if mask_heads is not None:
        (mask,) = tensors((2, mask_heads, 5, 5))
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    on_card = [None if tensor is None else tensor.to("hpu") for tensor in (q, k, v, mask)]
    out = FusedSDPA.apply(*on_card, 0.0, mask is None, None, "None", True, None, "right")
    torch.testing.assert_close(out.cpu(), expected)


@torch.inference_mode()
def test_fused_sdpa_refuses_what_the_vendor_refuses(new_card: Any) -> None:
    from habana_frameworks.torch.hpex.kernels import FusedSDPA

    new_card()
    q = torch.ones(1, 2, 4, 8).to("hpu")
    lengths = torch.tensor([3], dtype=torch.int32).to("hpu")
    mask = torch.zeros(1, 1, 4, 4).to("hpu")
    with pytest.raises(AssertionError, match="Valid sequence length is supported only"):
        FusedSDPA.apply(q, q, q, None, 0.0, False, None, "None", True, lengths, "right")
    with pytest.raises(RuntimeError, match="valid_seq_len needs is_causal and no attention mask"):
        FusedSDPA.apply(q, q, q, mask, 0.0, True, None, "None", True, lengths, "right")
    with pytest.raises(AssertionError, match="only when q/k/v inputs are BF16"):
        FusedSDPA.apply(q, q, q, None, 0.0, True, None, "fp32")


@torch.inference_mode()
def test_windows_and_sinks_come_with_software_1_23(new_card: Any) -> None:
    import habana_frameworks.torch.hpex.kernels as kernels

    q = torch.ones(1, 2, 4, 8)
    arguments = (None, 0.0, True, None, "None", True, None, "right", False, False, (1, 0), None)
    new_card(version="1.22.2")
    on_card = [q.to("hpu")] * 3
    with pytest.raises(TypeError):
        kernels.FusedSDPA.apply(*on_card, *arguments)
    new_card(version="1.23.0")
    assert kernels.FusedSDPA.apply(*on_card, *arguments).shape == q.shape


@torch.inference_mode()
def test_norm_and_rotary(new_card: Any) -> None:
    from habana_frameworks.torch.hpex.kernels import RotaryPosEmbeddingMode, apply_rotary_pos_emb
    from habana_frameworks.torch.hpex.normalization import FusedRMSNorm

    new_card()
    x, gamma, angle = tensors((2, 3, 8), (8,), (2, 3, 1, 8))
    out = FusedRMSNorm.apply(x.to("hpu"), gamma.to("hpu"), 1e-6)
    torch.testing.assert_close(out.cpu(), torch.nn.functional.rms_norm(x, (8,), gamma, 1e-6))
    with pytest.raises(RuntimeError, match="must be 3-dimensional, got 2"):
        FusedRMSNorm.apply(x[0].to("hpu"), gamma.to("hpu"), 1e-6)
    (heads,) = tensors((2, 3, 4, 8))
    cos, sin = angle.cos().to("hpu"), angle.sin().to("hpu")
    turned = apply_rotary_pos_emb(
        heads.bfloat16().to("hpu"), cos, sin, None, 0, RotaryPosEmbeddingMode.BLOCKWISE
    )
    assert turned.dtype is torch.float32


@torch.inference_mode()
def test_ops_exist_as_the_settings_say_and_take_no_host_tensors(new_card: Any) -> None:
    import habana_frameworks.torch.hpex.kernels as kernels

    new_card(version="1.21.0", missing=frozenset({"mixture_of_experts", "FusedSDPA"}))
    assert not hasattr(torch.ops.hpu, "block_softmax")
    assert not hasattr(torch.ops.hpu, "mixture_of_experts")
    assert not hasattr(kernels, "FusedSDPA")
    new_card(version="1.24.0", device="gaudi2")
    x, gamma = torch.ones(1, 2, 4), torch.ones(4)
    with pytest.raises(NotImplementedError, match="CPU"):
        torch.ops.hpu.rms_norm(x, gamma, 1e-6)
    scores = torch.ones(2, 1, 2, 1, 4).to("hpu")
    with pytest.raises(RuntimeError, match=r"Graph compile failed.*block_softmax"):
        torch.ops.hpu.block_softmax(scores, scores, torch.zeros(2, dtype=torch.int32).to("hpu"))
    cast, _ = torch.ops.hpu.cast_to_fp8_v2(x.to("hpu"), 1000.0, False, False, torch.float8_e4m3fn)
    assert cast.cpu().float().max().item() == 240.0
    new_card(version="1.24.0", device="gaudi3")
    assert torch.ops.hpu.block_softmax(scores, scores, torch.zeros(2, dtype=torch.int32).to("hpu"))


def test_modules_are_where_the_vendor_has_them() -> None:
    for name in ("hpex.kernels", "hpex.normalization", "hpu.graphs", "internal.bridge_config"):
        assert f"habana_frameworks.torch.{name}" in sys.modules
