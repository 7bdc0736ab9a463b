"""How a CPU computes, as an operator chooses it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from catenary.cpus import Binding, EngineCpus, parse_binding, place, read_topology
from catenary.directories import expanded

if TYPE_CHECKING:
    from services.engine.options import EngineOptions


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


def cpus_of(options: EngineOptions) -> EngineCpus:
    """Return the threads of the forwards and, if they are bound, the CPU of each. Raises ValueError."""
    try:
        # By itself an engine does not know who else computes here, so it takes no CPU that it was not given.
        binding = Binding(lists=parse_binding(options.cpu_bind).lists)
        placed = place(read_topology(), 1, binding, options.cpu_reserve or 0).engines[0]
    except ValueError as error:
        raise ValueError(f"cpu_bind, cpu_reserve: {error}") from None
    threads = options.device_threads
    if not threads:
        return placed
    if placed.cpus is None:
        return EngineCpus(threads)
    if threads > len(placed.cpus):
        raise ValueError(f"device_threads {threads} is more than the {len(placed.cpus)} CPUs of cpu_bind")
    return EngineCpus(threads, placed.cpus[:threads])


def cpu_settings(options: EngineOptions, cpus: tuple[int, ...] | None = None) -> CpuSettings:
    packed = None if options.quantization == "none" else Quantization(options.quantization)
    cache = expanded(options.cache_dir) if options.cache_dir else None
    return CpuSettings(
        KernelChoice(options.cpu_kernels),
        packed,
        cpus,
        cache,
        options.cpu_slice_us,
        options.cpu_kernels_compile_timeout_s,
    )
