"""CPU time and context switches of processes between two moments."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
        """Return seconds that have passed, and seconds of CPU by name."""
        passed, now = time.perf_counter() - self._began, self._read()
        return passed, {name: now[name] - spent for name, spent in self._spent.items()}

    def _read(self) -> dict[str, float]:
        times = {name: process.cpu_times() for name, process in self._processes.items()}
        return {name: float(spent.user + spent.system) for name, spent in times.items()}


@dataclass(frozen=True, slots=True)
class Work:
    """Of a process or thread: seconds on a CPU, seconds that it was ready for one and had none, and how often
    it went to sleep and was taken off."""

    cpu_s: float = 0.0
    waited_s: float = 0.0
    sleeps: int = 0
    taken_off: int = 0

    def __add__(self, other: Work) -> Work:
        return self._with(other, 1)

    def __sub__(self, other: Work) -> Work:
        return self._with(other, -1)

    def _with(self, other: Work, sign: int) -> Work:
        return Work(
            self.cpu_s + sign * other.cpu_s,
            self.waited_s + sign * other.waited_s,
            self.sleeps + sign * other.sleeps,
            self.taken_off + sign * other.taken_off,
        )


Thread = tuple[str, str]
"""A process's name, and the thread's, with its number."""


def read_work(pids: Mapping[str, int]) -> dict[Thread, Work]:
    """Return the work of each thread since its start."""
    found: dict[Thread, Work] = {}
    for name, pid in pids.items():
        for task in Path(f"/proc/{pid}/task").iterdir():
            # A thread may end meanwhile.
            with suppress(OSError):
                thread = f"{(task / 'comm').read_text().strip()} {task.name}"
                found[name, thread] = _work_of(task)
    return found


def work_since(before: Mapping[Thread, Work], after: Mapping[Thread, Work]) -> dict[Thread, Work]:
    """Return the work of threads between the two; those that ended meanwhile are left out."""
    return {thread: work - before.get(thread, Work()) for thread, work in after.items()}


def by_process(works: Mapping[Thread, Work]) -> dict[str, Work]:
    """Return the sum of each process's threads."""
    total: dict[str, Work] = {}
    for (name, _), work in works.items():
        total[name] = total.get(name, Work()) + work
    return total


def find_processes(root: int, names: Callable[[str], str | None]) -> dict[str, int]:
    """Process ids below and with `root`, by what `names` makes of their command lines, whose words spaces
    part; None: it is left out."""
    found: dict[str, int] = {}
    for pid in _tree(root):
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if (name := names(command)) is not None:
                found[name] = pid
    return found


def _tree(pid: int) -> Iterator[int]:
    yield pid
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _tree(int(child))


def _work_of(task: Path) -> Work:
    ran, waited, _ = map(int, (task / "schedstat").read_text().split())
    fields = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
    sleeps, taken_off = int(fields["voluntary_ctxt_switches"]), int(fields["nonvoluntary_ctxt_switches"])
    return Work(ran / 1e9, waited / 1e9, sleeps, taken_off)
