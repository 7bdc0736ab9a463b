"""Threads that compile constraints, and a cache of what they compiled."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

from services.engine.constraints.json_watch import JsonTokens, json_parts
from services.engine.constraints.restriction import CompiledConstraint, Restriction, Taken
from services.engine.constraints.vocabulary import (
    ConstraintRefused,
    GrammarBackend,
    Vocabulary,
)
from services.engine.domain import ConstraintOptions
from services.engine.scheduler import QueueFull

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
        """Return a constraint that is compiled already, else None."""
        self._keep()
        found = self._compiled.get(options)
        if found is not None:
            self.reused += 1
            self._compiled.move_to_end(options)
        return found

    def check_room(self) -> None:
        """Raise QueueFull if there are as many tasks as may be."""
        if len(self._compiling) + len(self._resuming) >= self._queue:
            raise QueueFull("grammar_queue", self._queue)

    def compile(self, options: ConstraintOptions, done: Callable[[], None]) -> Future[CompiledConstraint]:
        """Compile in another thread, which calls `done` at its end. The result raises ConstraintRefused."""
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
        """Follow a sequence that has these tokens already, in another thread, as `compile` does."""
        future = self._submit(_resume, compiled, stop_ids, token_ids)
        self._resuming.add(future)
        future.add_done_callback(self._resuming.discard)
        future.add_done_callback(lambda _: done())
        return future

    def close(self) -> None:
        """Drop the tasks that have not begun."""
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
        """Cache the constraints that were compiled since the last call."""
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
    """Return the bytes of a source."""
    return len(options.source.encode()) + len((options.after or "").encode())


def _resume(compiled: CompiledConstraint, stop_ids: frozenset[int], token_ids: Items[int]) -> Restriction:
    restriction = Restriction(compiled, stop_ids)
    if all(restriction.take(token_id) is Taken.GOES_ON for token_id in token_ids):
        return restriction
    raise ConstraintRefused("The tokens that the sequence has already do not fit its constraint.")
