"""The CPU: the device anyone can try."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.profiler import ProfilerActivity

from catenary.cpus import read_topology
from catenary.telemetry import get_logger
from services.engine.device.attention import flat_decode, fused_prefill
from services.engine.device.base import (
    DTYPES,
    Capabilities,
    Device,
    DeviceError,
    Execution,
    ExecutionMode,
    Kernels,
    Memory,
    Notices,
    Stream,
    Submitted,
)
from services.engine.device.cpu.native import BuildError, Library, open_library
from services.engine.device.cpu.native_decoder import CpuNativeDecoder, why_not_dtype, why_not_native
from services.engine.device.cpu.native_linears import CpuNativeLinears
from services.engine.device.cpu.packing import map_zeros
from services.engine.device.cpu.settings import CpuSettings, KernelChoice, cpu_settings, cpus_of
from services.engine.device.cpu.threads import Team, ask_for_slices
from services.engine.device.inductor import InductorExecution, allow_many_shapes, has_compiler
from services.engine.device.memory import (
    MemoryFigures,
    MemoryUse,
    host_memory,
    peak_resident_bytes,
    reset_peak_resident,
    resident_bytes,
)
from services.engine.device.native import NativeDecoder, NativeLinears, NativeSpec
from services.engine.device.profiling import Event, torch_activities

if TYPE_CHECKING:
    from services.engine.options import EngineOptions

Result = TypeVar("Result")

log = get_logger(__name__)

_MAPPED_BYTES = 1 << 20

CAPABILITIES = Capabilities(
    # A server on a shared machine must not fill it with KV unless told to: --kv-cache-gib raises this.
    kv_limit=2 * 2**30,
    # The largest forward takes seconds here, and little of the memory that KV leaves.
    measures_activations=False,
)


class CpuStream(Stream):
    """One thread, so that the caller goes on while it computes; `threads` of torch's share its kernels."""

    def __init__(self, threads: int, mode: ExecutionMode, slice_us: int) -> None:
        self.threads = threads
        self._mode = mode
        self._slice_us = slice_us
        self._executor = ThreadPoolExecutor(1, "device", self._begin)

    def _begin(self) -> None:
        # OpenMP keeps the number of threads per calling thread.
        torch.set_num_threads(self.threads)
        if self._slice_us:
            ask_for_slices(self._slice_us)
        if self._mode is ExecutionMode.COMPILE:
            allow_many_shapes()

    def submit(self, work: Callable[[], Result]) -> Submitted[Result]:
        return self._executor.submit(work)

    def synchronize(self) -> None:
        self.submit(bool).result()

    def close(self) -> None:
        self._executor.shutdown(wait=True)

    def profile(self) -> AbstractContextManager[list[Event]]:
        return torch_activities(self, (ProfilerActivity.CPU,))

    @contextmanager
    def small_work(self) -> Iterator[None]:
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(self.threads)


class CpuKernels(Kernels):
    """torch's CPU kernels, and our own ones in C++ for whole decoders and for linear layers."""

    attend_decode = staticmethod(flat_decode)

    def __init__(
        self, stream: CpuStream, mode: ExecutionMode, settings: CpuSettings, notices: Notices
    ) -> None:
        self.attend_prefill = partial(fused_prefill, groups_masked=True)
        self.needs_native = settings.needs_native
        self._stream = stream
        self._mode = mode
        self._settings = settings
        self._notices = notices

    def choose_dtype(self, requested: str, checkpoint: torch.dtype | None) -> torch.dtype:
        if requested == "auto":
            # Without the instructions torch emulates bfloat16, and float16 always: float32 is then the
            # faster.
            native = torch.cpu._is_avx512_bf16_supported()
            return torch.bfloat16 if checkpoint is torch.bfloat16 and native else torch.float32
        if requested not in DTYPES:
            raise DeviceError(f"dtype {requested!r} is unknown; choose auto, {', '.join(DTYPES)}")
        return DTYPES[requested]

    def native_dtype(self, requested: str, checkpoint: torch.dtype | None) -> torch.dtype:
        if requested == "auto" and checkpoint is torch.bfloat16 and self._why_only_torch() is None:
            # Our kernels read half of the memory then, and lose nothing of that without the instructions.
            return torch.bfloat16
        return self.choose_dtype(requested, checkpoint)

    def weight_size(self, dtype: torch.dtype) -> float:
        quantization = self._settings.quantization
        return super().weight_size(dtype) if quantization is None else quantization.weight_size

    def native_decoder(self, spec: NativeSpec) -> NativeDecoder | None:
        reason = self._why_only_torch() or why_not_native(spec)
        if reason is None:
            try:
                return CpuNativeDecoder(*self._open_native(), spec, self._settings.quantization)
            except BuildError as error:
                reason = str(error)
                if self.needs_native is None:
                    # The model could use the kernels: this machine lacks something, which can be mended.
                    self._notices.note(
                        f"torch computes the model, slower than the native kernels would: {reason}"
                    )
                    return None
        if self.needs_native is not None:
            raise self._unmet(reason)
        if self._settings.kernels is KernelChoice.AUTO:
            log.info("torch computes this model, not the native kernels", reason=reason)
        return None

    def native_linears(self, dtype: torch.dtype) -> NativeLinears | None:
        if self.needs_native is None:
            return None
        reason = self._why_only_torch() or why_not_dtype(dtype)
        if reason is None:
            try:
                return CpuNativeLinears(*self._open_native(), dtype, self._settings.quantization)
            except BuildError as error:
                reason = str(error)
        raise self._unmet(reason)

    def rows_to_redo(self, needed: torch.Tensor) -> torch.Tensor:
        rows = needed.nonzero().flatten()
        count = rows.shape[0]
        if count < 2:
            return rows
        width = min(1 << (count - 1).bit_length(), needed.shape[0])
        return torch.cat((rows, rows[:1].expand(width - count)))

    def _open_native(self) -> tuple[Library, Team]:
        settings = self._settings
        library = open_library(
            cache=settings.cache, progress=self._notices.progress, limit_s=settings.compile_s
        )
        # The stream's thread is the first of the team and not bound itself: OpenMP's threads, which it
        # starts, would all be on its CPU. It starts the others, which inherit its scheduling slices.
        team = self._stream.submit(partial(Team, library, self._stream.threads, settings.cpus or ())).result()
        return library, team

    def _unmet(self, reason: str) -> DeviceError:
        return DeviceError(f"{self.needs_native} needs the native kernels: {reason}")

    def _why_only_torch(self) -> str | None:
        if self._settings.kernels is KernelChoice.TORCH:
            return "cpu-kernels is torch"
        if self._mode is not ExecutionMode.EAGER:
            return "compiled and captured models are computed by torch"
        return None


class CpuMemory(Memory):
    """The host's memory, as far as this process may take it."""

    def figures(self) -> MemoryFigures:
        return host_memory()

    def measure(self, work: Callable[[], object]) -> MemoryUse:
        # Resident memory of the process: memory that the allocator keeps for later counts as kept.
        reset_peak_resident()
        before = resident_bytes()
        work()
        return MemoryUse(kept=max(0, resident_bytes() - before), peak=max(0, peak_resident_bytes() - before))

    def out_of_memory(self, error: BaseException) -> bool:
        if isinstance(error, OSError):
            # Pages that were to be mapped.
            return error.errno == errno.ENOMEM
        return super().out_of_memory(error) or "DefaultCPUAllocator: can't allocate memory" in str(error)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        if size < _MAPPED_BYTES:
            return torch.zeros(shape, dtype=dtype)
        # The kernel zeroes page by page on first use, whatever the allocator does: a KV cache takes real
        # memory only as sequences fill it, and the start does not wait for gigabytes to be written.
        return map_zeros(size).view(dtype).view(shape)


class CpuDevice(Device):
    """A CPU that computes on `threads` threads; None: one for each core that it may use."""

    def __init__(
        self,
        threads: int | None = None,
        mode: ExecutionMode = ExecutionMode.EAGER,
        settings: CpuSettings | None = None,
    ) -> None:
        settings = settings or CpuSettings()
        if threads is not None and threads < 1:
            raise DeviceError(f"threads must be at least 1, not {threads}")
        count = threads or _allowed_cores()
        torch.set_num_threads(count)
        compiled = mode is ExecutionMode.COMPILE
        if compiled and not has_compiler():
            raise DeviceError("compile needs a C++ compiler, and there is none: install g++, or set CXX")
        stream, notices = CpuStream(count, mode, settings.slice_us), Notices()
        super().__init__(
            "cpu",
            CAPABILITIES,
            CpuKernels(stream, mode, settings, notices),
            CpuMemory(torch.device("cpu")),
            InductorExecution(mode) if compiled else Execution(mode),
            stream,
            notices,
        )


def open_device(options: EngineOptions, mode: ExecutionMode) -> CpuDevice:
    """Open the CPU of an engine. Raises DeviceError, ValueError."""
    placed = cpus_of(options)
    return CpuDevice(placed.threads, mode, cpu_settings(options, placed.cpus))


def _allowed_cores() -> int:
    """Return the cores of this process: threads beyond a container's share only wait for one another."""
    topology = read_topology()
    return min(topology.count, topology.limit)
