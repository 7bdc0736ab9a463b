"""Bounds for a template that came with a request: time and memory, on top of the worker's own."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

# A signal may come where its exception is swallowed (in a finalizer): then it comes again.
_AGAIN_S = 0.25


class TemplateBudget(msgspec.Struct, frozen=True):
    """Bytes of the source; seconds of its compilation, and of its rendering; bytes that either may take."""

    max_bytes: int = 65_536
    seconds: float = 1.0
    memory_bytes: int = 256 << 20


class BudgetSpent(BaseException):
    """The time is up. Not an Exception: no handler of the template engine may take it for an error."""


@contextmanager
def bounded(budget: TemplateBudget) -> Iterator[None]:
    """Run the block under a budget. Raises BudgetSpent; memory ends as MemoryError.

    For the main thread alone: it is by a signal that the block is interrupted. A single step inside of the
    interpreter's own code cannot be; then the process is killed from outside.
    """
    armed = True

    def ring(_signal: int, _frame: object) -> None:
        if armed:
            raise BudgetSpent

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    former = signal.signal(signal.SIGALRM, ring)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (_ceiling(budget.memory_bytes, soft), hard))
        signal.setitimer(signal.ITIMER_REAL, budget.seconds, _AGAIN_S)
        yield
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _ceiling(more: int, soft: int) -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    ceiling = pages * resource.getpagesize() + more
    return ceiling if soft == resource.RLIM_INFINITY else min(ceiling, soft)
