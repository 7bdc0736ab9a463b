"""Linear layers of the kernels from Python: for tests and measurements. Forwards call them in C++."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from services.engine.device.cpu import Linear, Operand, Team, WeightKind
from services.engine.device.cpu.native import Library


class Way(IntEnum):
    """`Result::Way` of kernels.h."""

    STORE = 0
    ADD = 1
    GATE = 2
    BEST = 3


class _Result(ctypes.Structure):
    _fields_ = [
        ("way", c_int32),
        ("activation", c_int32),
        ("factor", c_float),
        ("out", c_void_p),
        ("stride", c_int64),
    ]


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """A packed weight [outputs, inputs]; of a gated layer gates and ups, `outputs` counting both."""

    kind: WeightKind
    outputs: int
    inputs: int
    gated: bool
    panels: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor
    bias: torch.Tensor | None

    def structure(self) -> Linear:
        bias = None if self.bias is None else self.bias.data_ptr()
        pointers = (self.panels.data_ptr(), self.scales.data_ptr(), self.sums.data_ptr(), bias)
        return Linear(self.kind, self.outputs, self.inputs, self.gated, *pointers)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Products that can be computed again and again, and the scales of int8 layers' rows [rows]."""

    scales: Sequence[torch.Tensor]
    call: Callable[[], None]
    # Tensors that the call reads and writes, which must live as long.
    held: tuple[object, ...]

    def run(self) -> None:
        self.call()


class Products:
    """Packs and multiplies with `threads` threads."""

    def __init__(self, library: Library, threads: int = 1) -> None:
        """Raises MemoryError if there are no such threads. Memory of torch is aligned as the kernels need."""
        function = library.function
        self._padded = function("catenary_padded_outputs", c_int64, c_int32, c_int32)
        self._bytes = function("catenary_packed_bytes", c_int64, *[c_int32] * 4)
        self._stride = function("catenary_operand_stride", c_int64, c_int32, c_int32)
        pack = [c_int32, c_void_p, c_void_p, c_int32, c_int32, c_void_p, c_void_p, c_void_p]
        self._pack = function("catenary_pack", None, *pack)
        self._pack_bias = function("catenary_pack_bias", None, c_void_p, c_void_p, c_int32, c_void_p)
        run = [c_void_p] * 4 + [c_int64, c_void_p, c_int64, c_int64]
        self._run = function("catenary_run_layers", None, *run)
        self._team = Team(library, threads)

    def pack(
        self,
        kind: WeightKind,
        weight: torch.Tensor,
        ups: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> PackedLayer:
        """weight float32 [outputs, inputs]; ups, of a gated layer, as many. bias [outputs], gates first."""
        gated = ups is not None
        rows, inputs = weight.shape
        outputs = 2 * rows if gated else rows
        padded = self._padded(outputs, gated)
        panels = torch.zeros(self._bytes(kind, outputs, inputs, gated), dtype=torch.uint8)
        scales, sums = torch.zeros(padded), torch.zeros(padded, dtype=torch.int32)
        weight, ups = weight.contiguous(), None if ups is None else ups.contiguous()
        second = None if ups is None else ups.data_ptr()
        addresses = (panels.data_ptr(), scales.data_ptr(), sums.data_ptr())
        self._pack(kind, weight.data_ptr(), second, outputs, inputs, *addresses)
        packed_bias = None
        if bias is not None:
            packed_bias = torch.zeros(padded)
            second = bias[rows:].data_ptr() if gated else None
            self._pack_bias(bias.data_ptr(), second, outputs, packed_bias.data_ptr())
        return PackedLayer(kind, outputs, inputs, gated, panels, scales, sums, packed_bias)

    def prepare(
        self,
        layers: Sequence[PackedLayer],
        x: torch.Tensor,
        outs: Sequence[torch.Tensor],
        *,
        way: Way = Way.STORE,
        activation: int = 0,
        factor: float = 1.0,
    ) -> Prepared:
        """Prepare the product of float32 [rows, the most inputs] with each layer, written or added to `outs`.

        A layer with fewer inputs takes the first ones.
        """
        rows = x.shape[0]
        strides = [self._stride(layer.kind, layer.inputs) for layer in layers]
        data = torch.zeros(rows * max(strides), dtype=torch.uint8)
        scales = [torch.zeros(rows) for _ in layers]
        pairs = zip(strides, scales, strict=True)
        operands = [Operand(data.data_ptr(), stride, scale.data_ptr()) for stride, scale in pairs]
        results = [_Result(way, activation, factor, out.data_ptr(), out.stride(0)) for out in outs]
        count = len(layers)
        arguments = (
            self._team.handle,
            (Linear * count)(*(layer.structure() for layer in layers)),
            (Operand * count)(*operands),
            (_Result * count)(*results),
            count,
            x.data_ptr(),
            x.stride(0),
            rows,
        )
        return Prepared(scales, lambda: self._run(*arguments), (x, data, *layers, *outs))

    def multiply(
        self, layers: Sequence[PackedLayer], x: torch.Tensor, outs: Sequence[torch.Tensor], **how: Any
    ) -> Prepared:
        """Compute once what `prepare` describes."""
        prepared = self.prepare(layers, x, outs, **how)
        prepared.run()
        return prepared
