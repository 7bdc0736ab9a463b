"""The constraints of a core's sequences: compiled beside the loop, waited for, and then applied."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, ParamSpec, TypeVar

import numpy as np

from catenary.telemetry import get_logger
from services.engine.constraints.json_watch import JsonTokens, json_parts
from services.engine.constraints.restriction import CompiledConstraint, Restriction, Taken
from services.engine.constraints.vocabulary import (
    Bits,
    ConstraintRefused,
    GrammarBackend,
    Matcher,
    Vocabulary,
)
from services.engine.domain import ConstraintOptions
from services.engine.link import ConstraintLoad
from services.engine.scheduler import QueueFull, Sequence, StepPlan

Given = ParamSpec("Given")
Result = TypeVar("Result")

# Grammars are read and compiled by recursion, as deep as half of such a stack allows (`ConstraintLimits`).
_STACK_BYTES: Final = 16 * 2**20


class ConstraintCompiler:
    """A few threads with at most `queue` tasks, and the last `cached` compiled constraints, as far as their
    sources have no more than `cached_bytes` together. `number_digits`: as `JsonTokens` has it.

    Used by the loop's thread alone, which never waits here: results are futures. A task cannot be stopped, so
    those of sequences that were aborted count until they end.
    """

    def __init__(
        self,
        backend: GrammarBackend,
        vocabulary: Vocabulary,
        *,
        threads: int,
        queue: int,
        cached: int,
        cached_bytes: int,
        number_digits: int = 40,
    ) -> None:
        self.backend = backend
        self.vocabulary = vocabulary
        self._queue = queue
        self._cached = cached
        self._cached_bytes = cached_bytes
        self._bytes = 0
        self._json = JsonTokens(vocabulary, number_digits)
        self._pool = ThreadPoolExecutor(threads, "constraints")
        self._compiled: OrderedDict[ConstraintOptions, CompiledConstraint] = OrderedDict()
        self._compiling: dict[ConstraintOptions, Future[CompiledConstraint]] = {}
        self._resuming: set[Future[Restriction]] = set()
        # Threads count what they compiled.
        self._lock = threading.Lock()
        self.compiled = 0
        self.reused = 0
        self.seconds = 0.0

    def find(self, options: ConstraintOptions) -> CompiledConstraint | None:
        """What is compiled already."""
        self._keep()
        found = self._compiled.get(options)
        if found is not None:
            self.reused += 1
            self._compiled.move_to_end(options)
        return found

    def check_room(self) -> None:
        """Raises QueueFull if there are as many tasks as may be."""
        if len(self._compiling) + len(self._resuming) >= self._queue:
            raise QueueFull("grammar_queue", self._queue)

    def compile(self, options: ConstraintOptions, done: Callable[[], None]) -> Future[CompiledConstraint]:
        """Compiles in another thread, which calls `done` at its end. The result raises ConstraintRefused."""
        found = self._compiling.get(options)
        if found is not None:
            self.reused += 1
            return found
        future = self._compiling[options] = self._submit(self._compile, options)
        future.add_done_callback(lambda _: done())
        return future

    def resume(
        self,
        compiled: CompiledConstraint,
        stop_ids: frozenset[int],
        token_ids: Items[int],
        done: Callable[[], None],
    ) -> Future[Restriction]:
        """Follows a sequence that has these tokens already, in another thread, as `compile` does."""
        future = self._submit(_resume, compiled, stop_ids, token_ids)
        self._resuming.add(future)
        future.add_done_callback(self._resuming.discard)
        future.add_done_callback(lambda _: done())
        return future

    def close(self) -> None:
        """Gives up what is not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(
        self, work: Callable[Given, Result], *args: Given.args, **options: Given.kwargs
    ) -> Future[Result]:
        # A pool starts its threads when there is work for them.
        before = threading.stack_size(_STACK_BYTES)
        try:
            return self._pool.submit(work, *args, **options)
        finally:
            threading.stack_size(before)

    def _keep(self) -> None:
        """Keeps what was compiled since the last time."""
        for options, future in list(self._compiling.items()):
            if future.done():
                del self._compiling[options]
                if future.exception() is None:
                    self._compiled[options] = future.result()
                    self._bytes += _size(options)
        while len(self._compiled) > self._cached or self._bytes > self._cached_bytes:
            gone, _ = self._compiled.popitem(last=False)
            self._bytes -= _size(gone)

    def _compile(self, options: ConstraintOptions) -> CompiledConstraint:
        begun = time.perf_counter()
        try:
            grammar = self.backend.compile(options)
            parts = json_parts(options)
            json = None if parts is None else (parts, self._json)
            if json is not None:
                self._json.prepare()
            return CompiledConstraint(grammar, options.after, self.vocabulary, json)
        finally:
            with self._lock:
                self.compiled += 1
                self.seconds += time.perf_counter() - begun


def _size(options: ConstraintOptions) -> int:
    """Bytes of a source."""
    return len(options.source.encode()) + len((options.after or "").encode())


def _resume(compiled: CompiledConstraint, stop_ids: frozenset[int], token_ids: Items[int]) -> Restriction:
    restriction = Restriction(compiled, stop_ids)
    if all(restriction.take(token_id) is Taken.GOES_ON for token_id in token_ids):
        return restriction
    raise ConstraintRefused("The tokens that the sequence has already do not fit its constraint.")


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


@dataclass(frozen=True, slots=True)
class StepMasks:
    """Masks of a step: row rows[m] of its sampling rows may get the tokens of bits[m], int32 [M, W].

    `failed`: sequences whose matchers failed meanwhile.
    """

    rows: list[int]
    bits: Bits
    failed: list[Sequence]


class Constraints:
    """Those that wait for their constraints, and the restrictions of those that have them, by key."""

    def __init__(
        self,
        compiler: ConstraintCompiler | None,
        *,
        limit: int,
        seconds: float,
        wake: Callable[[], None],
    ) -> None:
        self._compiler = compiler
        self._restrictions: dict[int, Restriction] = {}
        self.waiting = WaitingConstraints(compiler, limit=limit, seconds=seconds, wake=wake)
        self._refused = 0
        self._masks = 0
        self._seconds = 0.0

    def add(self, sequence: Sequence, options: ConstraintOptions) -> bool:
        """Takes a constrained sequence. True if it may run now, else `ready` gives it.

        Raises QueueFull, and ConstraintRefused without a compiler.
        """
        restriction = self.waiting.add(sequence, options)
        if restriction is None:
            return False
        self._restrictions[sequence.key] = restriction
        return True

    def ready(self) -> Iterator[tuple[Sequence, ConstraintRefused | None]]:
        """Sequences that may run now, and those that never will, with the reason."""
        for sequence, result in self.waiting.take():
            if isinstance(result, ConstraintRefused):
                self._refused += 1
                yield sequence, result
            else:
                self._restrictions[sequence.key] = result
                yield sequence, None

    def forget(self, key: int) -> None:
        """Drops what is known of a sequence that ended."""
        self._restrictions.pop(key, None)

    def concern(self, plan: StepPlan) -> bool:
        """True if the plan samples for a constrained sequence."""
        return bool(self._restrictions) and any(sequence.constrained for sequence in plan.sampling())

    def masks(self, plan: StepPlan) -> StepMasks | None:
        """Masks of a step whose sequences have all their tokens; None if none of them lives."""
        if self._compiler is None:
            return None
        begun = time.perf_counter()
        rows: list[int] = []
        found: list[tuple[Sequence, Restriction]] = []
        for row, sequence in enumerate(plan.sampling()):
            restriction = self._restrictions.get(sequence.key)
            if restriction is not None and not sequence.finished:
                rows.append(row)
                found.append((sequence, restriction))
        if not rows:
            return None
        bits: Bits = np.empty((len(rows), self._compiler.vocabulary.words), dtype=np.int32)
        failed = self._fill(self._compiler, found, bits)
        self._masks += 1
        self._seconds += time.perf_counter() - begun
        return StepMasks(rows, bits, failed)

    @staticmethod
    def _fill(
        compiler: ConstraintCompiler, found: Items[tuple[Sequence, Restriction]], bits: Bits
    ) -> list[Sequence]:
        matchers: list[tuple[Matcher, int]] = [
            (restriction.matcher, index) for index, (_, restriction) in enumerate(found) if restriction.active
        ]
        if matchers:
            compiler.backend.fill(matchers, bits)
        failed: list[Sequence] = []
        for index, (sequence, restriction) in enumerate(found):
            if restriction.active and restriction.matcher.failed:
                failed.append(sequence)
                continue
            mask_stops = sequence.masks_stops(len(sequence.token_ids))
            restriction.narrow(bits[index], mask_stops=mask_stops)
        return failed

    def take(self, sequence: Sequence, token_id: int) -> Taken:
        """Tells of a token that a living sequence got."""
        restriction = self._restrictions.get(sequence.key)
        return Taken.GOES_ON if restriction is None else restriction.take(token_id)

    def complete(self, sequence: Sequence) -> bool:
        """True if a constrained sequence's text may end as it is."""
        restriction = self._restrictions.get(sequence.key)
        return restriction is not None and restriction.complete

    def load(self) -> ConstraintLoad:
        """The figures so far."""
        compiler = self._compiler
        if compiler is None:
            return ConstraintLoad()
        return ConstraintLoad(
            compiled=compiler.compiled,
            reused=compiler.reused,
            refused=self._refused,
            masks=self._masks,
            compile_seconds=compiler.seconds,
            mask_seconds=self._seconds,
        )
