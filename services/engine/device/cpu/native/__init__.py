"""Kernels of the CPU in C++: built once for each machine, loaded by ctypes."""

from __future__ import annotations

from services.engine.device.cpu.native.building import (
    LEVELS,
    BuildError,
    Level,
    best_level,
    build,
    find_compiler,
    levels_here,
)
from services.engine.device.cpu.native.library import Library, open_library

__all__ = [
    "LEVELS",
    "BuildError",
    "Level",
    "Library",
    "best_level",
    "build",
    "find_compiler",
    "levels_here",
    "open_library",
]
