"""HBM in numbers. Source: docs/gaudi-facts.md 4.3."""

from __future__ import annotations

from collections.abc import Callable

from services.engine.device.hpu.bridge import HpuModule
from services.engine.device.memory import MemoryFigures, MemoryUse

# Messages of the bridge when a tensor or a workspace of a recipe finds no room: "MODULE:PT_DEVMEM Allocation
# failed for size::234881024 (224)MB", "MODULE:SYNHELPER workspace Allocation of size ::14493510400 failed!"
# (optimum-habana issue 1469, Model-References issue 10).
_FULL = ("allocation failed for size", "workspace allocation of size", "out of memory")


def hbm_figures(hpu: HpuModule) -> MemoryFigures:
    """Total and free HBM: the process holds the whole card, so all that is free is its own."""
    free, total = hpu.mem_get_info()
    return MemoryFigures(total=total, free=free)


def measure_hbm(hpu: HpuModule, flush: Callable[[], None], work: Callable[[], object]) -> MemoryUse:
    """Runs `work` to its end on the device. Returns the bytes that it kept, and its peak."""
    flush()
    hpu.synchronize()
    hpu.reset_peak_memory_stats()
    before = hpu.memory_allocated()
    work()
    flush()
    hpu.synchronize()
    kept, peak = hpu.memory_allocated() - before, hpu.max_memory_allocated() - before
    return MemoryUse(kept=max(0, kept), peak=max(0, peak))


def says_full(error: BaseException) -> bool:
    """Whether an error of the bridge means that HBM is full."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in _FULL)
