"""Weights as the native kernels read them."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import suppress
from ctypes import c_int32, c_int64, c_void_p
from functools import partial
from typing import Any

import torch

from catenary.memory import find_trim
from services.engine.device.cpu.native import Library
from services.engine.device.cpu.settings import Quantization
from services.engine.device.cpu.structures import Linear, WeightKind
from services.engine.device.native import NativeLinear

HUGE_PAGE = 2 << 20


def map_zeros(size: int) -> torch.Tensor:
    """uint8 [size], zeros at the begin of a page: real memory only from the first write on, page by page.

    In huge pages where the system has them: a context or weights in small ones take up to twice as long to
    read. `size` is at least 1. Raises OSError when the process may have no more.
    """
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Linux may have been built without them.
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


# Bytes of weights that are mapped at once; pages that are not written take no memory.
_ALIGNMENT = 128
_MAPPED = 64 << 20
# Rows that are converted at once: a multiple of every panel, and a few megabytes.
_PANELS = 64
_PART_NUMBERS = 1 << 22
# Channels that are mixed with one another at most: kMostMixed of native/mixing.h.
_MOST_MIXED = 64


_Structure = ctypes.Structure | ctypes.Array[Linear]


def weight_kind(dtype: torch.dtype, quantization: Quantization | None) -> WeightKind:
    """Return the kind that weights are packed as for computing in `dtype`."""
    if quantization is None:
        return WeightKind.BFLOAT16 if dtype is torch.bfloat16 else WeightKind.FLOAT32
    return WeightKind.INT8 if quantization is Quantization.INT8 else WeightKind.INT4


class Packer:
    """Packs linear layers, with the threads of `pool`, and keeps the packed weights."""

    def __init__(self, library: Library, pool: Executor) -> None:
        self._pool = pool
        self._bytes = library.function("catenary_packed_bytes", c_int64, c_int32, c_int32, c_int32, c_int32)
        self._padded = library.function("catenary_padded_outputs", c_int64, c_int32, c_int32)
        self._pack = library.function(
            "catenary_pack", None, c_int32, c_void_p, c_void_p, c_int32, c_int32, c_void_p, c_void_p, c_void_p
        )
        self._pack_bias = library.function("catenary_pack_bias", None, c_void_p, c_void_p, c_int32, c_void_p)
        self._kept: list[torch.Tensor] = []
        self._held: list[_Structure] = []
        self._trim = find_trim()
        self._pages = _HugePages()

    @property
    def bytes(self) -> int:
        """Bytes of all that was packed or kept."""
        return sum(tensor.nbytes for tensor in self._kept)

    def keep(self, tensor: torch.Tensor | None) -> int | None:
        """Return the address of a tensor that lives as long as the packer; None for none."""
        if tensor is None:
            return None
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def give_back(self) -> None:
        """Give memory back to the system that packed weights were freed in."""
        # Allocators keep memory that is freed in the middle of a heap, or all of it.
        if self._trim is not None:
            self._trim()

    def hold(self, structure: _Structure) -> Any:
        """A pointer to a structure that lives as long as the packer."""
        self._held.append(structure)
        return ctypes.pointer(structure)

    def linear(self, layer: NativeLinear, kind: WeightKind) -> Linear:
        """The layer packed as `kind`."""
        (result,) = self._room(layer.weight.unsqueeze(0), kind, gated=layer.gated)
        if layer.bias is not None:
            outputs = layer.weight.shape[0]
            bias = torch.zeros(int(self._padded(outputs, layer.gated)), dtype=torch.float32)
            first, ups = _halves(layer.bias.float(), layer.gated)
            self._pack_bias(first.data_ptr(), _address(ups), outputs, bias.data_ptr())
            result.bias = self.keep(bias)
        self._do(self._fillings(layer.weight, result))
        return result

    def stacked(self, weights: torch.Tensor, kind: WeightKind, *, gated: bool = False) -> Any:
        """Return the layers without bias, [count, outputs, inputs], one behind another: an array of them."""
        results = self._room(weights, kind, gated=gated)
        pairs = zip(weights, results, strict=True)
        self._do(job for weight, result in pairs for job in self._fillings(weight, result))
        array = (Linear * len(results))(*results)
        self._held.append(array)
        return array

    def _room(self, weights: torch.Tensor, kind: WeightKind, *, gated: bool) -> list[Linear]:
        """Return the layers that are still to be filled, in memory of their own."""
        count, outputs, inputs = weights.shape
        padded, size = int(self._padded(outputs, gated)), int(self._bytes(kind, outputs, inputs, gated))
        results = [
            Linear(kind, outputs, inputs, gated, self.keep(self._pages.take(size))) for _ in range(count)
        ]
        if kind is WeightKind.INT8:
            scales = self.keep(torch.zeros(count * padded, dtype=torch.float32)) or 0
            sums = self.keep(torch.zeros(count * padded, dtype=torch.int32)) or 0
            for index, result in enumerate(results):
                result.scales, result.sums = scales + 4 * index * padded, sums + 4 * index * padded
        return results

    def _do(self, jobs: Iterable[Callable[[], None]]) -> None:
        list(self._pool.map(lambda job: job(), jobs))

    def _fillings(self, whole: torch.Tensor, packed: Linear) -> Iterator[Callable[[], None]]:
        """Return jobs that convert and pack a weight part by part, never as a whole in float32."""
        gated, kind, inputs = bool(packed.gated), packed.kind, packed.inputs
        weight, ups = _halves(whole, gated)

        def pack(rows: slice) -> None:
            part = _prepared(weight[rows], kind)
            other = None if ups is None else _prepared(ups[rows], kind)
            times = 2 if gated else 1
            before = rows.start * times
            skipped = int(self._bytes(kind, before, inputs, gated)) if before else 0
            self._pack(
                kind,
                part.data_ptr(),
                _address(other),
                part.shape[0] * times,
                inputs,
                packed.panels + skipped,
                packed.scales and packed.scales + 4 * before,
                packed.sums and packed.sums + 4 * before,
            )

        return (partial(pack, rows) for rows in _parts(*weight.shape))


def _parts(rows: int, inputs: int) -> Iterator[slice]:
    step = max(1, _PART_NUMBERS // (inputs * _PANELS)) * _PANELS
    return (slice(start, min(rows, start + step)) for start in range(0, rows, step))


def _prepared(rows: torch.Tensor, kind: int) -> torch.Tensor:
    """Return rows of a weight [count, inputs] to pack, float32; for int8 mixed, see native/mixing.h."""
    rows = rows.float().contiguous()
    if kind != WeightKind.INT8:
        return rows
    count, inputs = rows.shape
    mixed = min(_MOST_MIXED, inputs & -inputs)
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < mixed:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (matrix / mixed @ rows.view(count, mixed, -1)).view(count, inputs)


def _halves(tensor: torch.Tensor, gated: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    if not gated:
        return tensor, None
    gates, ups = tensor.chunk(2)
    return gates, ups


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class _HugePages:
    """Zeroed memory in pages as large as the system gives: all weights are read for every token.

    Weights share them, since most are smaller than such a page, or end within one.
    """

    def __init__(self) -> None:
        self._mapped = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, size: int) -> torch.Tensor:
        """uint8 [size], aligned."""
        if self._used + size > len(self._mapped):
            whole = -(-max(size, _MAPPED) // HUGE_PAGE) * HUGE_PAGE
            self._mapped, self._used = map_zeros(whole), 0
        taken = self._mapped[self._used : self._used + size]
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return taken
