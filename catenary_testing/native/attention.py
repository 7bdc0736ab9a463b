"""Paged attention of the native kernels, called by itself: for tests and measurements.

The decoder's forward calls the kernels from C++.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.engine.device.cpu.native import Library

_KINDS = {torch.float32: 0, torch.bfloat16: 1}


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one sequence: the batch's rows [first, first + tokens) at positions context, context + 1, ...

    blocks: ids of the blocks of positions 0 to context + tokens, in order.
    """

    first: int
    tokens: int
    context: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class PagedCache:
    """Keys and values [layers, slots, kv_heads, head_dim] of layers, contiguous, float32 or bfloat16."""

    key: torch.Tensor
    value: torch.Tensor
    block_size: int


class _Cache(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
    )


class _Shape(ctypes.Structure):
    _fields_ = (
        ("heads", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("window", ctypes.c_int32),
        ("softcap", ctypes.c_float),
    )


class _Span(ctypes.Structure):
    _fields_ = (
        ("first", ctypes.c_int64),
        ("tokens", ctypes.c_int32),
        ("context", ctypes.c_int32),
        ("blocks", ctypes.c_void_p),
    )


class NativeAttention:
    """The kernels of one library, over float32 tensors that are contiguous in their last dimension."""

    def __init__(self, library: Library) -> None:
        pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        # Whether a bfloat16 cache is multiplied with queries and weights rounded to bfloat16.
        self.multiplies_pairs = bool(library.function("catenary_multiplies_pairs", int32)())
        self._supported = library.function("catenary_attention_supported", int32, pointer, int32)
        spans = (pointer, int64)
        rows = (pointer, int64)
        self._attend = library.function(
            "catenary_attend", int32, pointer, pointer, *spans, int64, int64, *rows, *rows, int32
        )
        self._write_kv = library.function("catenary_write_kv", None, pointer, int64, pointer, pointer)

    def supported(self, cache: PagedCache, heads: int) -> bool:
        """Return whether the kernels have this shape."""
        return bool(self._supported(ctypes.byref(_described(cache)), heads))

    def attend(
        self,
        query: torch.Tensor,
        cache: PagedCache,
        spans: Sequence[Span],
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        threads: int = 1,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the attention of query [rows, heads, head_dim] in each layer of the cache.

        Returns float32 [layers, rows, heads, head_dim], which is `out` if that is given; rows of no span stay
        as they are there, or zero. An `out` [1, ...] is overwritten by each layer. Raises MemoryError.
        """
        rows, heads, dim = query.shape
        layers = cache.key.shape[0]
        out = torch.zeros(layers, rows, heads, dim) if out is None else out
        tables = [torch.tensor(span.blocks, dtype=torch.int32) for span in spans]
        described = (_Span * len(spans))(
            *(
                _Span(span.first, span.tokens, span.context, table.data_ptr())
                for span, table in zip(spans, tables, strict=True)
            )
        )
        shape = _Shape(heads, scale, window, softcap)
        stride = cache.key.stride(0) * cache.key.element_size()
        done = self._attend(
            ctypes.byref(_described(cache)),
            ctypes.byref(shape),
            described,
            len(spans),
            layers,
            stride,
            query.data_ptr(),
            query.stride(0),
            out.data_ptr(),
            out.stride(0) if out.shape[0] > 1 else 0,
            threads,
        )
        if not done:
            raise MemoryError
        return out

    def write_kv(self, cache: PagedCache, slot: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write key and value [kv_heads, head_dim] at a slot of the first layer."""
        self._write_kv(ctypes.byref(_described(cache)), slot, key.data_ptr(), value.data_ptr())


def _described(cache: PagedCache) -> _Cache:
    _, _, kv_heads, head_dim = cache.key.shape
    kind = _KINDS[cache.key.dtype]
    return _Cache(kind, cache.block_size, kv_heads, head_dim, cache.key.data_ptr(), cache.value.data_ptr())
