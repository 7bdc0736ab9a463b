"""The CPU: the device anyone can try."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity

from catenary.cpus import read_topology
from catenary.telemetry import get_logger
from services.engine.device.base import DTYPES, DeviceError, ExecutionMode, Submitted
from services.engine.device.cpu.native import BuildError, Library, open_library
from services.engine.device.cpu.native_decoder import CpuNativeDecoder, why_not_dtype, why_not_native
from services.engine.device.cpu.native_linears import CpuNativeLinears
from services.engine.device.cpu.packing import map_zeros
from services.engine.device.cpu.settings import CpuSettings, Kernels
from services.engine.device.cpu.threads import Team, ask_for_slices
from services.engine.device.inductor import InductorDevice, allow_many_shapes, has_compiler
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

Result = TypeVar("Result")

log = get_logger(__name__)

_MAPPED_BYTES = 1 << 20


class CpuDevice(InductorDevice):
    """Computes with torch's CPU kernels on `threads` threads (None: one for each core it may use).

    One thread of its own is the stream: the caller goes on while it computes.
    """

    name = "cpu"
    torch_device = torch.device("cpu")
    wide_dtype = torch.float64
    groups_masked = True
    # A server on a shared machine must not fill it with KV unless told to: --kv-cache-gib raises this.
    kv_limit = 2 * 2**30
    # The largest forward takes seconds here, and little of the memory that KV leaves.
    measures_activations = False

    def __init__(
        self,
        threads: int | None = None,
        mode: ExecutionMode = ExecutionMode.EAGER,
        settings: CpuSettings | None = None,
    ) -> None:
        super().__init__(mode)
        self._settings = settings or CpuSettings()
        self.needs_native = self._settings.needs_native
        if threads is not None and threads < 1:
            raise DeviceError(f"threads must be at least 1, not {threads}")
        count = threads or _allowed_cores()
        self._threads = count
        torch.set_num_threads(count)
        if mode is ExecutionMode.COMPILE and not has_compiler():
            raise DeviceError("compile needs a C++ compiler, and there is none: install g++, or set CXX")
        self._stream = ThreadPoolExecutor(1, "device", self._begin_stream, (count,))

    def _begin_stream(self, threads: int) -> None:
        # OpenMP keeps the number of threads per calling thread.
        torch.set_num_threads(threads)
        if self._settings.slice_us:
            ask_for_slices(self._settings.slice_us)
        if self.mode is ExecutionMode.COMPILE:
            allow_many_shapes()

    def submit(self, work: Callable[[], Result]) -> Submitted[Result]:
        return self._stream.submit(work)

    def close(self) -> None:
        self._stream.shutdown(wait=True)

    def native_decoder(self, spec: NativeSpec) -> NativeDecoder | None:
        reason = self._why_only_torch() or why_not_native(spec)
        if reason is None:
            try:
                return CpuNativeDecoder(*self._open_native(), spec, self._settings.quantization)
            except BuildError as error:
                reason = str(error)
                if self.needs_native is None:
                    # The model could use the kernels: this machine lacks something, which can be mended.
                    self.note(f"torch computes the model, slower than the native kernels would: {reason}")
                    return None
        if self.needs_native is not None:
            raise self._unmet(reason)
        if self._settings.kernels is Kernels.AUTO:
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

    def _open_native(self) -> tuple[Library, Team]:
        settings = self._settings
        library = open_library(cache=settings.cache, progress=self.tell, limit_s=settings.compile_s)
        # The stream's thread is the first of them and not bound itself: those of OpenMP, which it starts,
        # would all be where it is. It starts the others, which have its slices then.
        return library, self._stream.submit(Team, library, self._threads, settings.cpus or ()).result()

    def _unmet(self, reason: str) -> DeviceError:
        return DeviceError(f"{self.needs_native} needs the native kernels: {reason}")

    def weight_size(self, dtype: torch.dtype) -> float:
        quantization = self._settings.quantization
        return super().weight_size(dtype) if quantization is None else quantization.weight_size

    def _why_only_torch(self) -> str | None:
        if self._settings.kernels is Kernels.TORCH:
            return "cpu-kernels is torch"
        if self.mode is not ExecutionMode.EAGER:
            return "compiled and captured models are computed by torch"
        return None

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

    def memory(self) -> MemoryFigures:
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

    def profile(self) -> AbstractContextManager[list[Event]]:
        return torch_activities(self, (ProfilerActivity.CPU,))

    @contextmanager
    def small_work(self) -> Iterator[None]:
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(self._threads)

    def synchronize(self) -> None:
        self.submit(bool).result()

    def rows_to_redo(self, needed: torch.Tensor) -> torch.Tensor:
        rows = needed.nonzero().flatten()
        count = rows.shape[0]
        if count < 2:
            return rows
        width = min(1 << (count - 1).bit_length(), needed.shape[0])
        return torch.cat((rows, rows[:1].expand(width - count)))

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        if size < _MAPPED_BYTES:
            return torch.zeros(shape, dtype=dtype)
        # The kernel zeroes page by page on first use, whatever the allocator does: a KV cache takes real
        # memory only as sequences fill it, and the start does not wait for gigabytes to be written.
        return map_zeros(size).view(dtype).view(shape)


def _allowed_cores() -> int:
    """Cores of this process: more threads than a container's share only wait for one another."""
    topology = read_topology()
    return min(topology.count, topology.limit)
