"""Linear layers that a CPU's kernels compute one by one, for models whose other operations are torch's."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int32, c_int64, c_void_p

import torch

from services.engine.device.cpu.native import Library
from services.engine.device.cpu.packing import Packer, weight_kind
from services.engine.device.cpu.settings import Quantization
from services.engine.device.cpu.structures import CACHE_KINDS, Linear, Operand
from services.engine.device.cpu.threads import Team
from services.engine.device.native import NativeLinear

# Floats of a row's scratch: threads write to no cache line of one another.
_LINE = 16


class CpuNativeLinears:
    """Implements `NativeLinears`. One product at a time, by the team's threads and the caller's."""

    def __init__(
        self, library: Library, team: Team, dtype: torch.dtype, quantization: Quantization | None
    ) -> None:
        self._dtype, self._kind = dtype, weight_kind(dtype, quantization)
        # Lives as long as its threads are needed.
        self._team = team
        pointers = [c_void_p, ctypes.POINTER(Linear), ctypes.POINTER(Operand), c_int32, c_void_p, c_int64]
        self._run = library.function("catenary_run_linear", None, *pointers, c_void_p, c_int64, c_void_p)
        self._stride = library.function("catenary_operand_stride", c_int64, c_int32, c_int32)
        self._pool = ThreadPoolExecutor(team.size)
        self._packer = Packer(library, self._pool)

    def pack(self, layer: NativeLinear) -> PackedLinear:
        if layer.gated:
            raise ValueError("a gated layer is no layer by itself")
        return PackedLinear(self, self._packer.linear(layer, self._kind))

    def packed(self) -> None:
        self._pool.shutdown()
        self._packer.give_back()

    def weight_bytes(self) -> int:
        return self._packer.bytes

    def multiply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        """x [..., inputs] of the dtype -> [..., outputs] of the same."""
        if x.dtype is not self._dtype or x.shape[-1] != layer.inputs:
            raise ValueError(f"rows of {x.shape[-1]} numbers of {x.dtype} are none of this layer")
        if not x.numel():
            return x.new_empty(*x.shape[:-1], layer.outputs)
        x = x.contiguous()
        rows, stride = x.numel() // layer.inputs, int(self._stride(layer.kind, layer.inputs))
        data = torch.empty(rows * stride, dtype=torch.uint8)
        scales = torch.empty(rows)
        scratch = torch.empty(self._team.size, -(-layer.inputs // _LINE) * _LINE)
        out = torch.empty(*x.shape[:-1], layer.outputs)
        operand = Operand(data.data_ptr(), stride, scales.data_ptr())
        self._run(
            self._team.handle,
            ctypes.byref(layer),
            ctypes.byref(operand),
            CACHE_KINDS[self._dtype],
            x.data_ptr(),
            rows,
            scratch.data_ptr(),
            scratch.shape[1],
            out.data_ptr(),
        )
        return out.to(self._dtype)


class PackedLinear:
    """One packed layer; `CpuNativeLinears` keeps its weights."""

    def __init__(self, linears: CpuNativeLinears, layer: Linear) -> None:
        self._linears = linears
        self._layer = layer

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._linears.multiply(self._layer, x)
