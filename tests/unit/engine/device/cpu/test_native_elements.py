"""Norms, rotary positions, activations and the writing of keys and values, as torch computes them."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from torch.nn import functional

from catenary_testing.native.attention import NativeAttention, PagedCache
from services.engine.device.cpu.native import Library
from services.engine.device.kernels import rms_norm, rotate
from tests.support.native_kernels import LEVELS_HERE, library_of

POINTER, INT32, INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


@pytest.fixture(scope="module", params=LEVELS_HERE)
def library(request: pytest.FixtureRequest) -> Library:
    return library_of(request.param)


@pytest.mark.parametrize("size", [1, 7, 16, 33, 576, 2049])
def test_rms_norm(library: Library, size: int) -> None:
    norm = library.function("catenary_rms_norm", None, POINTER, POINTER, INT32, ctypes.c_float, POINTER)
    x, weight = torch.randn(size), torch.randn(size)
    expected = rms_norm(x, weight, 1e-5, unit_offset=False)
    out = torch.empty(size)
    norm(x.data_ptr(), weight.data_ptr(), size, 1e-5, out.data_ptr())
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=1e-6)
    norm(x.data_ptr(), weight.data_ptr(), size, 1e-5, x.data_ptr())
    assert torch.equal(x, out)


@pytest.mark.parametrize(("dim", "rotated"), [(64, 64), (80, 32), (16, 4), (24, 24), (256, 128)])
def test_rotate(library: Library, dim: int, rotated: int) -> None:
    native = library.function("catenary_rotate", None, POINTER, POINTER, POINTER, INT32)
    head, angles = torch.randn(dim), torch.randn(rotated // 2)
    cos, sin = angles.cos(), angles.sin()
    expected = rotate(head.view(1, 1, dim), cos.repeat(2).view(1, 1, -1), sin.repeat(2).view(1, 1, -1))
    native(head.data_ptr(), cos.data_ptr(), sin.data_ptr(), rotated)
    torch.testing.assert_close(head, expected.view(dim), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (0, lambda x: x),
        (1, functional.silu),
        (2, lambda x: functional.gelu(x, approximate="tanh")),
        (3, functional.gelu),
    ],
    ids=("none", "silu", "gelu_tanh", "gelu"),
)
def test_activations(library: Library, kind: int, expected: object) -> None:
    assert callable(expected)
    x = torch.cat((torch.linspace(-20, 20, 4000), torch.tensor([1e4, -1e4, 0.0, -0.0] * 4)))
    want = expected(x)
    library.function("catenary_activate", None, INT32, POINTER, INT64)(kind, x.data_ptr(), x.numel())
    torch.testing.assert_close(x, want, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("kind", [1, 2, 3])
def test_what_is_no_number_stays_none(library: Library, kind: int) -> None:
    x = torch.full((16,), math.nan)
    library.function("catenary_activate", None, INT32, POINTER, INT64)(kind, x.data_ptr(), x.numel())
    assert x.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 8), (3, 64), (2, 72)])
def test_write_kv(library: Library, dtype: torch.dtype, kv_heads: int, head_dim: int) -> None:
    empty = torch.zeros(1, 8, kv_heads, head_dim, dtype=dtype)
    cache = PagedCache(empty, empty.clone(), block_size=4)
    key, value = torch.randn(kv_heads, head_dim), torch.randn(kv_heads, head_dim)
    key[0, 0] = math.nan
    NativeAttention(library).write_kv(cache, 5, key, value)
    for tensor, written in ((cache.key, key), (cache.value, value)):
        torch.testing.assert_close(tensor[0, 5], written.to(dtype), rtol=0, atol=0, equal_nan=True)
        assert not tensor[0, [0, 1, 2, 3, 4, 6, 7]].any()
