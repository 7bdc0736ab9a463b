"""CPU time of processes between two moments."""

from __future__ import annotations

import time
from collections.abc import Mapping

import psutil


class CpuMeter:
    """User and system time of named processes, all of their threads, since `start`."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self._spent: dict[str, float] = {}
        self._began = 0.0

    def start(self) -> None:
        """Begin to count."""
        self._spent = self._read()
        self._began = time.perf_counter()

    def stop(self) -> tuple[float, dict[str, float]]:
        """Seconds that have passed, and seconds of CPU by name."""
        passed, now = time.perf_counter() - self._began, self._read()
        return passed, {name: now[name] - spent for name, spent in self._spent.items()}

    def _read(self) -> dict[str, float]:
        times = {name: process.cpu_times() for name, process in self._processes.items()}
        return {name: float(spent.user + spent.system) for name, spent in times.items()}
