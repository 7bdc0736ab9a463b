"""Sequences that wait until their constraints are compiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from catenary.telemetry import get_logger
from services.engine.constraints.compiler import ConstraintCompiler
from services.engine.constraints.matching import ConstraintRefused
from services.engine.constraints.restriction import CompiledConstraint, Restriction
from services.engine.domain import ConstraintOptions
from services.engine.scheduler import QueueFull, Sequence

log = get_logger(__name__)

_FAILED = "The constraint cannot be compiled."
_NO_COMPILER = "This engine's model cannot be given constraints: its tokenizer is of no kind that they know."


@dataclass(slots=True)
class _Entry:
    sequence: Sequence
    deadline: float
    compiler: ConstraintCompiler
    compiled: Future[CompiledConstraint]
    # Of a sequence that goes on after some tokens.
    resumed: Future[Restriction] | None = None


class WaitingConstraints:
    """At most `limit` sequences, each for `seconds`.

    `wake` is called from another thread when one of them may be ready.
    """

    def __init__(
        self, compiler: ConstraintCompiler | None, *, limit: int, seconds: float, wake: Callable[[], None]
    ) -> None:
        self._compiler = compiler
        self._limit = limit
        self._seconds = seconds
        self._wake = wake
        self._entries: dict[int, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def tokens(self) -> int:
        """Of the sequences."""
        return sum(len(entry.sequence.token_ids) for entry in self._entries.values())

    @property
    def patience(self) -> float | None:
        """Seconds until somebody has waited too long; None if nobody waits."""
        deadlines = [entry.deadline for entry in self._entries.values()]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def add(self, sequence: Sequence, options: ConstraintOptions) -> Restriction | None:
        """Lets a sequence wait, or returns its restriction if that is there.

        Raises QueueFull, and ConstraintRefused without a compiler.
        """
        compiler = self._compiler
        if compiler is None:
            raise ConstraintRefused(_NO_COMPILER)
        found = compiler.find(options)
        if found is not None and not sequence.num_generated_tokens:
            return Restriction(found, sequence.params.stop_ids)
        if len(self._entries) >= self._limit:
            raise QueueFull("grammar_queue", self._limit)
        compiler.check_room()
        if found is None:
            compiled = compiler.compile(options, self._wake)
        else:
            compiled = Future()
            compiled.set_result(found)
        deadline = time.monotonic() + self._seconds
        self._entries[sequence.key] = _Entry(sequence, deadline, compiler, compiled)
        return None

    def remove(self, key: int) -> Sequence | None:
        """Takes out one that waits; None if it does not."""
        entry = self._entries.pop(key, None)
        return None if entry is None else entry.sequence

    def take(self) -> Iterator[tuple[Sequence, Restriction | ConstraintRefused]]:
        """Takes out those that are ready, or never will be, in the order of their arrival."""
        if not self._entries:
            return
        now = time.monotonic()
        for key, entry in list(self._entries.items()):
            result = self._result(entry, now)
            if result is not None:
                del self._entries[key]
                yield entry.sequence, result

    def _result(self, entry: _Entry, now: float) -> Restriction | ConstraintRefused | None:
        try:
            found = self._ready(entry)
        except ConstraintRefused as refusal:
            return refusal
        except Exception as error:
            # Its text may show the constraint.
            log.error("a constraint cannot be compiled", error=type(error).__name__)
            return ConstraintRefused(_FAILED)
        if found is None and now >= entry.deadline:
            return ConstraintRefused(
                f"The constraint was not compiled in {self._seconds:g} seconds (grammar_timeout_s)."
            )
        return found

    def _ready(self, entry: _Entry) -> Restriction | None:
        if entry.resumed is not None:
            return entry.resumed.result() if entry.resumed.done() else None
        if not entry.compiled.done():
            return None
        compiled, stop_ids = entry.compiled.result(), entry.sequence.params.stop_ids
        count = entry.sequence.num_generated_tokens
        if not count:
            return Restriction(compiled, stop_ids)
        tokens = entry.sequence.token_ids[-count:]
        entry.resumed = entry.compiler.resume(compiled, stop_ids, tokens, self._wake)
        return None
