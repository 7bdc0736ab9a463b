"""Bounds for a template that came with a request: time and memory, on top of the worker's own."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from services.tokenizer.memory import bounded_memory

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

    former = signal.signal(signal.SIGALRM, ring)
    try:
        with bounded_memory(budget.memory_bytes):
            signal.setitimer(signal.ITIMER_REAL, budget.seconds, _AGAIN_S)
            yield
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
