"""Instruction sets that the kernels are compiled for, and which of them this CPU has."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Level:
    """One instruction set: the compiler's options, and the flags (Linux's names) of CPUs that have it."""

    name: str
    options: tuple[str, ...]
    needs: frozenset[str]


_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}
_AVX512_OPTIONS = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mfma", "-mf16c")

# The best first.
LEVELS = (
    Level("avx512bf16", (*_AVX512_OPTIONS, "-mavx512bf16"), _AVX512 | {"avx512_bf16"}),
    Level("avx512", _AVX512_OPTIONS, _AVX512),
    Level("avx2", ("-mavx2", "-mfma", "-mf16c"), _AVX2),
    Level("portable", (), frozenset()),
)


def levels_here() -> tuple[Level, ...]:
    """The levels that this CPU can run, the best first. The portable one always is the last."""
    flags = _cpu_flags()
    return tuple(level for level in LEVELS if level.needs <= flags)


def best_level() -> Level:
    return levels_here()[0]


def levels_of_this_architecture() -> tuple[Level, ...]:
    """The levels that a compiler here can make libraries for, whatever this CPU itself can run."""
    return LEVELS if platform.machine() in ("x86_64", "AMD64") else LEVELS[-1:]


@cache
def _cpu_flags() -> frozenset[str]:
    """Flags of this CPU; none where the system does not tell them, or it is no x86."""
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    found = (line.partition(":")[2].split() for line in lines if line.startswith("flags"))
    return frozenset(next(found, []))
