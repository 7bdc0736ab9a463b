"""How a CPU computes, as an operator chooses it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class KernelChoice(Enum):
    """Our own in C++, torch's operations, or ours where they can be had."""

    AUTO = "auto"
    NATIVE = "native"
    TORCH = "torch"


class Quantization(Enum):
    """The number format that weights of linear layers are packed in."""

    INT8 = "int8"
    INT4 = "int4"

    @property
    def weight_size(self) -> float:
        """Bytes of a weight; int4 has a scale and an offset of 16 bits for 32 of them."""
        return 1.0 if self is Quantization.INT8 else 0.625


@dataclass(frozen=True, slots=True)
class CpuSettings:
    """quantization None: weights have the type of the computation. cpus: where the threads keep to, one each,
    this process being there already; None: wherever there is room. cache: Catenary's, where kernels are kept
    that are built here; None: the default one. slice_us: microseconds that its threads ask to run at a time;
    0: they ask for nothing. compile_s: seconds that the compiler may take for a file of the kernels.
    """

    kernels: KernelChoice = KernelChoice.AUTO
    quantization: Quantization | None = None
    cpus: tuple[int, ...] | None = None
    cache: Path | None = None
    slice_us: int = 0
    compile_s: float = 180.0

    @property
    def needs_native(self) -> str | None:
        """The option that torch's operations cannot meet."""
        if self.quantization is not None:
            return f"quantization {self.quantization.value}"
        return "cpu-kernels native" if self.kernels is KernelChoice.NATIVE else None
