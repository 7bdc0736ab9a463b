"""NVIDIA GPUs: CUDA graphs for each bucket and torch's fused attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity

from services.engine.device.attention import flat_decode, fused_prefill
from services.engine.device.base import (
    DTYPES,
    Capabilities,
    Device,
    DeviceError,
    Execution,
    ExecutionMode,
    Forward,
    HostCopy,
    Kernels,
    Memory,
    Stream,
)
from services.engine.device.inductor import InductorExecution, allow_many_shapes
from services.engine.device.memory import MemoryFigures, MemoryUse
from services.engine.device.profiling import Event, torch_activities

if TYPE_CHECKING:
    from services.engine.options import EngineOptions


class PinnedCopy:
    """A copy into pinned memory, begun in the order of the current stream."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record()

    def wait(self) -> torch.Tensor:
        self._done.synchronize()
        return self._host


# cuBLAS and others allocate and choose kernels in their first calls, which a capture may not do.
_RUNS_BEFORE_CAPTURE = 2


class GraphExecution(Execution):
    """CUDA graphs, or eager forwards. One graph runs at a time, so that they share memory."""

    def __init__(self, mode: ExecutionMode) -> None:
        super().__init__(mode)
        self._captures = 0
        self._replays = 0
        self._pool: Any = None

    def capture(self, forward: Forward, tensors: Sequence[torch.Tensor]) -> Forward:
        inputs = [tensor.clone() for tensor in tensors]
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_RUNS_BEFORE_CAPTURE):
                forward(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU, as a profiler does; thread_local lets them.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = forward(*inputs)
        if self._pool is None:
            self._pool = graph.pool()
        self._captures += 1

        def replay(*given: torch.Tensor) -> Any:
            for held, tensor in zip(inputs, given, strict=True):
                held.copy_(tensor, non_blocking=True)
            graph.replay()
            self._replays += 1
            # Held by this closure, so that no later capture takes their memory.
            return outputs

        return replay

    def counters(self) -> dict[str, int]:
        return {"captures": self._captures, "replays": self._replays}


class CompiledExecution(InductorExecution):
    """torch's compiler. No graph is captured: the counts of graphs stay zero."""

    def counters(self) -> dict[str, int]:
        return {"captures": 0, "replays": 0, "backend_compilations": self.compilations()}


class CudaKernels(Kernels):
    """torch's CUDA kernels."""

    attend_decode = staticmethod(flat_decode)

    def __init__(self) -> None:
        self.attend_prefill = partial(fused_prefill, groups_masked=False)

    def choose_dtype(self, requested: str, checkpoint: torch.dtype | None) -> torch.dtype:
        if requested == "auto":
            # Tensor cores are made for half precision. bfloat16 holds the range of a float32 checkpoint.
            native = torch.cuda.is_bf16_supported(including_emulation=False)
            return torch.float16 if checkpoint is torch.float16 or not native else torch.bfloat16
        if requested not in DTYPES:
            raise DeviceError(f"dtype {requested!r} is unknown; choose auto, {', '.join(DTYPES)}")
        return DTYPES[requested]


class CudaMemory(Memory):
    """The GPU's memory, and pinned memory of the host."""

    def figures(self) -> MemoryFigures:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        # Memory that torch's allocator keeps for later is free to this process.
        kept = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return MemoryFigures(total=total, free=free + kept)

    def measure(self, work: Callable[[], object]) -> MemoryUse:
        # A graph's memory stays reserved for its pool although no tensor holds it: `kept` is therefore the
        # memory that the allocator cannot give back.
        self._settle()
        reserved = torch.cuda.memory_reserved(self.torch_device)
        allocated = torch.cuda.memory_allocated(self.torch_device)
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        work()
        torch.cuda.synchronize(self.torch_device)
        peak = torch.cuda.max_memory_allocated(self.torch_device) - allocated
        self._settle()
        kept = torch.cuda.memory_reserved(self.torch_device) - reserved
        return MemoryUse(kept=max(0, kept), peak=max(0, peak))

    def _settle(self) -> None:
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()

    def host_buffer(self, count: int) -> torch.Tensor:
        # Only pinned memory is copied while the host goes on.
        return torch.zeros(count, dtype=torch.int64, pin_memory=True)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.torch_device, non_blocking=True)


class CudaStream(Stream):
    """The current CUDA stream of the calling thread."""

    def __init__(self, torch_device: torch.device) -> None:
        self._torch_device = torch_device

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._torch_device)

    def begin_to_host(self, tensor: torch.Tensor) -> HostCopy:
        self.host_copies += 1
        return PinnedCopy(tensor)

    def profile(self) -> AbstractContextManager[list[Event]]:
        return torch_activities(self, (ProfilerActivity.CPU, ProfilerActivity.CUDA))


class CudaDevice(Device):
    """One GPU, the first that CUDA_VISIBLE_DEVICES shows."""

    def __init__(self, mode: ExecutionMode = ExecutionMode.GRAPH) -> None:
        _check_available()
        torch_device = torch.device("cuda", torch.cuda.current_device())
        compiled = mode is ExecutionMode.COMPILE
        if compiled:
            allow_many_shapes()
        super().__init__(
            "cuda",
            Capabilities(),
            CudaKernels(),
            CudaMemory(torch_device),
            CompiledExecution(mode) if compiled else GraphExecution(mode),
            CudaStream(torch_device),
        )


def open_device(options: EngineOptions, mode: ExecutionMode) -> CudaDevice:
    """Open the GPU of an engine; no option is CUDA's own. Raises DeviceError."""
    del options
    return CudaDevice(mode)


def _check_available() -> None:
    if torch.version.cuda is None:
        raise DeviceError("this torch is built without CUDA: install a CUDA build of torch, or choose cpu")
    if not torch.cuda.is_available():
        raise DeviceError(
            "no NVIDIA GPU can be used here: check that nvidia-smi lists one, that the driver fits CUDA "
            f"{torch.version.cuda}, and CUDA_VISIBLE_DEVICES"
        )
