"""The HPU's memory, its stream and its device: Intel Gaudi 2 and 3 through Habana's PyTorch bridge.

The card writes into pinned memory by itself. A copy to pageable memory lands in a buffer of the bridge first,
and moves on at some time after the event that says that the card is done: source BRG, synapse_helpers.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch.profiler import ProfilerActivity

from catenary.telemetry import get_logger
from services.engine.device.base import (
    Capabilities,
    Device,
    Execution,
    ExecutionMode,
    FinishedCopy,
    HostCopy,
    Memory,
    Stream,
)
from services.engine.device.hpu.bridge import Bridge, Event, HpuModule
from services.engine.device.hpu.execution import PersistentBuffers, execution_for
from services.engine.device.hpu.fused import FusedKernels
from services.engine.device.hpu.kernels import HpuKernels
from services.engine.device.hpu.settings import HpuProperties, HpuSettings
from services.engine.device.memory import MemoryFigures, MemoryUse
from services.engine.device.profiling import Event as TraceEvent
from services.engine.device.profiling import torch_activities

log = get_logger(__name__)

CAPABILITIES = Capabilities(
    # There is no float64 on the card.
    wide_dtype=torch.float32,
    static_shapes=True,
    block_size=128,
)

# Messages of the bridge when a tensor or a workspace of a recipe finds no room: "MODULE:PT_DEVMEM Allocation
# failed for size::234881024 (224)MB", "MODULE:SYNHELPER workspace Allocation of size ::14493510400 failed!"
# (optimum-habana issue 1469, Model-References issue 10).
_FULL = ("allocation failed for size", "workspace allocation of size", "out of memory")


class HpuMemory(Memory):
    """HBM of the card, all of which this process holds."""

    def __init__(
        self,
        torch_device: torch.device,
        hpu: HpuModule,
        execution: Execution,
        buffers: PersistentBuffers,
        *,
        weights_on_host: bool,
    ) -> None:
        super().__init__(torch_device)
        self._hpu = hpu
        self._execution = execution
        self._buffers = buffers
        self._weights_on_host = weights_on_host

    @property
    def loading_device(self) -> torch.device:
        return torch.device("cpu") if self._weights_on_host else self.torch_device

    def figures(self) -> MemoryFigures:
        free, total = self._hpu.mem_get_info()
        return MemoryFigures(total=total, free=free)

    def measure(self, work: Callable[[], object]) -> MemoryUse:
        hpu, flush = self._hpu, self._execution.flush
        flush()
        hpu.synchronize()
        hpu.reset_peak_memory_stats()
        before = hpu.memory_allocated()
        work()
        flush()
        hpu.synchronize()
        kept, peak = hpu.memory_allocated() - before, hpu.max_memory_allocated() - before
        return MemoryUse(kept=max(0, kept), peak=max(0, peak))

    def out_of_memory(self, error: BaseException) -> bool:
        text = str(error).lower()
        full = isinstance(error, RuntimeError) and any(phrase in text for phrase in _FULL)
        return full or super().out_of_memory(error)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._buffers.add(super().zeros(shape, dtype))

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        # Collected operations are flushed first: a recipe would else hold them together with the views that a
        # step takes of this tensor, and there would be one for each kind of step. The bridge keeps the host's
        # tensor until it is read; its memory is filled again only when the step that it is for is finished.
        self._execution.flush()
        return tensor.to(self.torch_device, non_blocking=True)


class PinnedMemory:
    """Pinned host memory, handed out again and again in sizes that are powers of two.

    A buffer is lent from `take` on, until the event behind the copy into it has passed: known at once where
    the copy was waited for (`give`), and asked at a later `take` where it was dropped (`abandon`).
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        # The card may still write to lent memory: it must not be freed.
        self._lent: dict[int, torch.Tensor] = {}
        # In the order of the stream. A copy may be dropped in any thread, in the middle of a `take` too.
        self._abandoned: deque[tuple[torch.Tensor, Event]] = deque()
        self._there = True

    def take(self, count: int) -> torch.Tensor | None:
        """Lend at least `count` bytes, uint8, until they are given back; None if memory cannot be pinned."""
        self._reclaim()
        size = 1 << max(6, (count - 1).bit_length())
        free = self._free[size]
        buffer = free.pop() if free else self._pin(size)
        if buffer is not None:
            self._lent[buffer.data_ptr()] = buffer
        return buffer

    def give(self, buffer: torch.Tensor) -> None:
        """Take back a buffer whose copy has ended and was read."""
        del self._lent[buffer.data_ptr()]
        self._free[buffer.numel()].append(buffer)

    def abandon(self, buffer: torch.Tensor, event: Event) -> None:
        """Take back a buffer whose copy was dropped unread, for use again once `event` has passed."""
        self._abandoned.append((buffer, event))

    def _reclaim(self) -> None:
        while self._abandoned and self._abandoned[0][1].query():
            self.give(self._abandoned.popleft()[0])

    def _pin(self, size: int) -> torch.Tensor | None:
        if not self._there:
            return None
        reason = "is not pinned after all"
        try:
            # The buffer is written to in inference mode and outside of it.
            with torch.inference_mode(False):
                buffer = torch.empty(size, dtype=torch.uint8).pin_memory("hpu")
            if buffer.is_pinned("hpu"):
                return buffer
        except RuntimeError as error:
            reason = " ".join(str(error).split())
        self._there = False
        log.warning("host memory cannot be pinned: each copy to the host is waited for", reason=reason)
        return None


class EventCopy:
    """A copy in the stream's order into lent memory, with an event after it, before which the memory is void.

    The memory goes back to `pinned` after `wait`, or when the copy is dropped without one.
    """

    def __init__(self, host: torch.Tensor, event: Event, pinned: PinnedMemory, memory: torch.Tensor) -> None:
        """`host` is a view of `memory`, which `pinned` lent."""
        self._host = host
        self._event = event
        self._pinned = pinned
        self._memory = memory
        self._result: torch.Tensor | None = None
        self._dropped = weakref.finalize(self, pinned.abandon, memory, event)
        # At the end of the process all memory goes with it.
        self._dropped.atexit = False

    def wait(self) -> torch.Tensor:
        """The tensor on the host, once all of it is there, in memory of its own."""
        if self._result is None:
            self._event.synchronize()
            self._result = self._host.clone()
            self._dropped.detach()
            self._pinned.give(self._memory)
        return self._result


class HpuStream(Stream):
    """The card's own queue: the caller's thread enqueues and goes on."""

    def __init__(self, bridge: Bridge, execution: Execution) -> None:
        self._hpu = bridge.hpu
        self._flush = execution.flush
        self._pinned = PinnedMemory()

    def synchronize(self) -> None:
        self._flush()
        self._hpu.synchronize()

    def begin_to_host(self, tensor: torch.Tensor) -> HostCopy:
        self.host_copies += 1
        tensor = tensor.contiguous()
        self._flush()
        count = tensor.numel() * tensor.itemsize
        memory = self._pinned.take(count)
        if memory is None:
            return FinishedCopy(tensor.cpu())
        host = memory[:count].view(tensor.dtype).view(tensor.shape)
        host.copy_(tensor, non_blocking=True)
        event = self._hpu.Event()
        event.record()
        return EventCopy(host, event, self._pinned, memory)

    def profile(self) -> AbstractContextManager[list[TraceEvent]]:
        # docs/gaudi-facts.md 4.8: the bridge gives torch's profiler the card's activities under this name.
        return torch_activities(self, (ProfilerActivity.CPU, ProfilerActivity.HPU))


class HpuDevice(Device):
    """One card, which this process has acquired: `open_hpu` makes it."""

    kernels: HpuKernels

    def __init__(
        self,
        bridge: Bridge,
        properties: HpuProperties,
        mode: ExecutionMode,
        settings: HpuSettings,
        fused: FusedKernels,
    ) -> None:
        # Not before the bridge is loaded, which registers the name with torch.
        torch_device = torch.device("hpu")
        buffers = PersistentBuffers()
        execution = execution_for(mode, bridge, settings, buffers)
        memory = HpuMemory(
            torch_device, bridge.hpu, execution, buffers, weights_on_host=settings.weights_on_host
        )
        kernels, stream = HpuKernels(fused, settings), HpuStream(bridge, execution)
        super().__init__("hpu", CAPABILITIES, kernels, memory, execution, stream)
        self.properties = properties
