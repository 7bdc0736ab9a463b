"""Memory of a device in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Memory of the device in bytes; `free` is what this process may still take."""

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What a piece of work took, in bytes: `kept` is still held after it, `peak` was held at the most."""

    kept: int
    peak: int


def host_memory() -> MemoryFigures:
    """The machine's memory, or the container's if that is less."""
    figures = psutil.virtual_memory()
    total, free = int(figures.total), int(figures.available)
    limit, used = read_bytes(_CGROUP_LIMIT), read_bytes(_CGROUP_USED)
    if limit is not None and used is not None:
        total, free = min(total, limit), min(free, max(0, limit - used))
    return MemoryFigures(total=total, free=free)


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


def reset_peak_resident() -> None:
    """Makes the kernel forget the highest resident size. Without the right to, it stays that of the life."""
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


def read_bytes(path: Path) -> int | None:
    """A file that holds one number; None if it is missing or says "max"."""
    try:
        return int(path.read_text().strip())
    except (OSError, ValueError):
        return None
