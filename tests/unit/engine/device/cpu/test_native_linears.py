"""Linear layers by themselves: packed for a CPU's kernels, each row apart from the others."""

from __future__ import annotations

import pytest
import torch

from services.engine.device import DeviceError, ExecutionMode, NativeLinear
from services.engine.device.cpu import CpuDevice, CpuSettings, KernelChoice
from services.engine.device.cpu import Quantization as Q

# The largest relative error of a product with random Gaussian weights and rows.
ERRORS = {Q.INT8: 0.02, Q.INT4: 0.1}
ROWS = (1, 5, 33, 200)


def device(quantization: Q | None = None, threads: int = 1, **more: object) -> CpuDevice:
    return CpuDevice(threads, settings=CpuSettings(KernelChoice.NATIVE, quantization), **more)  # type: ignore[arg-type]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize("quantization", [None, *Q], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(33, 24), (64, 384), (7, 31)])
def test_products_are_those_of_torch(
    outputs: int, inputs: int, dtype: torch.dtype, quantization: Q | None
) -> None:
    linears = device(quantization).kernels.native_linears(dtype)
    assert linears is not None
    weight, bias = random(outputs, inputs).to(dtype), random(outputs, seed=1).to(dtype)
    layer, plain = linears.pack(NativeLinear(weight, bias)), linears.pack(NativeLinear(weight))
    linears.packed()
    assert linears.weight_bytes() > 0
    for rows in ROWS:
        x = random(rows, inputs, seed=2).to(dtype)
        found, expected = layer(x), x.double() @ weight.double().T
        assert found.dtype is dtype
        error = (found.double() - bias.double() - expected).norm() / expected.norm()
        limit = 1e-6 if quantization is None else ERRORS[quantization]
        # What is given has eight bits of mantissa, and the bias is added before.
        assert error < limit + (0 if dtype is torch.float32 else 2**-7)
        assert (plain(x).double() + bias.double() - found.double()).norm() < 2**-7 * found.double().norm()
        # To the bit, whatever is beside it.
        assert torch.equal(layer(x[-1:]), found[-1:])
        assert torch.equal(layer(x.view(1, rows, inputs)), found.view(1, rows, outputs))
        assert torch.equal(layer(x.T.contiguous().T), found)


@pytest.mark.parametrize("quantization", [None, Q.INT8], ids=str)
def test_no_bit_depends_on_threads(quantization: Q | None) -> None:
    weight, x = random(100, 64), random(90, 64, seed=3)
    found = []
    for threads in (1, 3):
        linears = device(quantization, threads).kernels.native_linears(torch.float32)
        assert linears is not None
        found.append(linears.pack(NativeLinear(weight))(x))
    assert torch.equal(*found)


def test_rows_are_left_as_they_are() -> None:
    linears = device(Q.INT8).kernels.native_linears(torch.float32)
    assert linears is not None
    layer = linears.pack(NativeLinear(random(16, 64)))
    x = random(9, 64)
    before = x.clone()
    layer(x)
    assert torch.equal(x, before)
    assert layer(x[:0]).shape == (0, 16)


def test_a_row_that_is_no_number_harms_no_other() -> None:
    linears = device(Q.INT8).kernels.native_linears(torch.float32)
    assert linears is not None
    layer = linears.pack(NativeLinear(random(40, 64)))
    x = random(5, 64)
    good = layer(x)
    x[1, 3] = torch.nan
    x[3, 0] = torch.inf
    found = layer(x)
    assert torch.equal(found[[0, 2, 4]], good[[0, 2, 4]])
    assert found[[1, 3]].isnan().all()


def test_other_rows_are_refused() -> None:
    linears = device().kernels.native_linears(torch.bfloat16)
    assert linears is not None
    layer = linears.pack(NativeLinear(random(16, 64).bfloat16()))
    for x in (random(2, 64), random(2, 32).bfloat16()):
        with pytest.raises(ValueError, match="are none of this layer"):
            layer(x)
    with pytest.raises(ValueError, match="gated"):
        linears.pack(NativeLinear(random(16, 64), gated=True))


def test_torch_computes_unless_it_was_asked_for() -> None:
    assert CpuDevice(1).kernels.native_linears(torch.float32) is None
    assert (
        CpuDevice(1, settings=CpuSettings(KernelChoice.TORCH)).kernels.native_linears(torch.float32) is None
    )
    with pytest.raises(
        DeviceError, match="quantization int8 needs the native kernels: float16 is not native"
    ):
        device(Q.INT8).kernels.native_linears(torch.float16)
    with pytest.raises(
        DeviceError, match="cpu-kernels native needs the native kernels: compiled and captured models"
    ):
        device(mode=ExecutionMode.COMPILE).kernels.native_linears(torch.float32)
