"""Memory of a device in numbers."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

import psutil

from catenary.cgroups import memory_limits

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Memory of the device in bytes; `free` is what this process may still take."""

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of a piece of work, in bytes: `kept` is still held after it, `peak` was held at the most."""

    kept: int
    peak: int


def host_memory(root: Path = Path("/")) -> MemoryFigures:
    """The machine's memory, or less: what the control groups of this process, as containers have them, and
    its limit of address space leave."""
    total, free = _machine_memory()
    for group in memory_limits(root):
        total, free = min(total, group.limit), min(free, group.left)
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        taken = int(psutil.Process().memory_info().vms)
        total, free = min(total, space), min(free, max(0, space - taken))
    return MemoryFigures(total=total, free=free)


def _machine_memory() -> tuple[int, int]:
    """All of the machine's memory, and what is free of it."""
    try:
        figures = psutil.virtual_memory()
        return int(figures.total), int(figures.available)
    except (OSError, KeyError, ValueError):
        # No /proc/meminfo, or one without the numbers, as some sandboxes have it.
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


def reset_peak_resident() -> None:
    """Make the kernel forget the highest resident size. Without the right to, it stays that of the life."""
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return


def peak_resident_bytes() -> int:
    """Highest resident size since `reset_peak_resident`; the present one where the kernel does not tell."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return resident_bytes()
