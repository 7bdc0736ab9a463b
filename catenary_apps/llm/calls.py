"""Calls of an LLM: work on its event loop, with progress, until the LLM is closed or collected."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures.thread as executors
import os
import re
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from catenary.loop_thread import LoopThread, join_daemons
from catenary.parameters import Numbers, check_number
from catenary.v1 import common_pb2
from catenary_apps.llm.local_engine import EngineStartError
from catenary_apps.llm.stack import LocalStack
from gateway import ApiError

_PREFIX = "catenary: "
# In a pipe a count is told so often.
_EVERY_S = 10.0
_PROMPTS = "{} of {} prompts are done"
_NUMBER = re.compile(r"\d+")


class Shown(ABC):
    """Shows something while it is entered, and leaves nothing behind on a terminal."""

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class StartProgress(Shown):
    """Shows the activity of a starting engine and the share of the start that is done, from the first line
    on."""

    def __init__(self, model: str, *, shown: bool) -> None:
        self._lines = _Lines() if shown else None
        self._bar: _Bar | None = None
        if shown and _is_terminal():
            self._lines, self._bar = (
                None,
                _Bar((BarColumn(), TextColumn("{task.description}", markup=False)), 1.0),
            )
        self.tell(f"loading {model}", None)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def tell(self, activity: str, fraction: float | None) -> None:
        """Show the activity; `fraction` is 0..1, or None if it is not known."""
        if self._bar is not None:
            self._bar.update(activity, fraction)
        if self._lines is not None:
            self._lines.tell(activity)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._lines is not None and error is None:
            self._lines.tell("ready")


class BatchProgress(Shown):
    """How many prompts are done."""

    def __init__(self, total: int, *, shown: bool) -> None:
        self._total, self._done = total, 0
        self._lines = _Lines(_PROMPTS.format(0, total)) if shown else None
        self._bar: _Bar | None = None
        if shown and _is_terminal():
            columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._lines, self._bar = None, _Bar(columns, total)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def advance(self) -> None:
        self._done += 1
        if self._bar is not None:
            self._bar.advance()
        if self._lines is not None:
            self._lines.tell(_PROMPTS.format(self._done, self._total))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


class _Lines:
    """A line for what is new. One that differs in its numbers alone is new after a while.

    `known`: counts as told already.
    """

    def __init__(self, known: str = "") -> None:
        self._text, self._shape = known, _NUMBER.sub("#", known)
        self._told_s = time.monotonic()

    def tell(self, text: str) -> None:
        shape, now = _NUMBER.sub("#", text), time.monotonic()
        if text == self._text or (shape == self._shape and now - self._told_s < _EVERY_S):
            return
        self._text, self._shape, self._told_s = text, shape, now
        if sys.stderr is not None:
            # A program may have closed it.
            with suppress(OSError, ValueError):
                sys.stderr.write(f"{_PREFIX}{text}\n")
                sys.stderr.flush()


class _Bar:
    """A bar on the terminal."""

    def __init__(self, columns: tuple[ProgressColumn, ...], total: float) -> None:
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("", total=total)
        self.start, self.stop = self._progress.start, self._progress.stop

    def update(self, text: str, fraction: float | None) -> None:
        self._progress.update(self._task, description=text, completed=fraction)

    def advance(self) -> None:
        self._progress.advance(self._task)


def _is_terminal() -> bool:
    return Console(stderr=True).is_terminal


# A step of an engine, and a part of its start, take less, on a loaded machine too. What goes on longer is
# left alone: a device that hangs does not keep the program.
_PATIENCE_S = 60.0
# A thread that uses no engine for so long, while the interpreter waits to end, is taken to use none any more.
_QUIET_S = 2.0


class Lifetime:
    """A stack and the loop that it runs on. The end of the program ends it in order."""

    def __init__(self, loop: LoopThread, stack: LocalStack) -> None:
        self.loop = loop
        self.stack = stack
        self._process = os.getpid()
        self._closing = False
        _alive.add(self)

    def close(self, patience_s: float | None = None) -> None:
        """End the engine and give its memory back; after `patience_s` leave it as it is. Idempotent."""
        _alive.discard(self)
        if self._closing or self.loop.closed:
            self.loop.join(patience_s)
            return
        self._closing = True
        try:
            self.loop.run(self.stack.stop(), timeout_s=patience_s)
        finally:
            self.loop.close()

    def abandon(self) -> None:
        """Begin to end it, without waiting: a finalizer may run on any thread, the loop's too."""
        _alive.discard(self)
        if self._closing:
            return
        self._closing = True
        # The loop alone: whoever holds the stack holds the model's memory.
        _ending.difference_update([loop for loop in _ending if loop.closed])
        _ending.add(self.loop)
        self.loop.end_with(self.stack.stop)

    def end_with_program(self) -> None:
        """End it while the interpreter ends. A forked process has no thread of it, and leaves it alone."""
        if os.getpid() == self._process:
            with suppress(Exception):
                self.close(_PATIENCE_S)


class EngineUse:
    """How many calls of engines run now, and when the last one ended."""

    def __init__(self, quiet_s: float = _QUIET_S) -> None:
        self._quiet_s = quiet_s
        self._ended = threading.Condition()
        self._running = 0
        self._ended_s = 0.0
        self._over = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """Yield a call, from its begin to its end. Raises RuntimeError once the program ends.

        A daemon's goes no further then: such a thread is to stop with the program, and without a word.
        """
        with self._ended:
            over = self._over
            self._running += not over
        if over and threading.current_thread().daemon:
            threading.Event().wait()
        if over:
            raise RuntimeError("the program has ended, and its engines: join the threads that use an LLM")
        try:
            yield
        finally:
            with self._ended:
                self._running -= 1
                self._ended_s = time.monotonic()
                self._ended.notify_all()

    def end(self) -> None:
        """Wait until the program's threads make no call any more, and take none from then on.

        They may make one as long as there are such threads, but for those that have made none for a while.
        """
        begun_s = time.monotonic()
        while threads := _other_threads():
            with self._ended:
                self._ended.wait_for(lambda: not self._running)
                left_s = max(begun_s, self._ended_s) + self._quiet_s - time.monotonic()
                if left_s <= 0:
                    self._over = True
                    return
            # It ends, or makes a call, or lets the time pass.
            threads[0].join(left_s)
        with self._ended:
            # Daemons and workers of executors may be in a call, and begin no other.
            self._over = True
            self._ended.wait_for(lambda: not self._running)

    def stop(self) -> None:
        """Take no call from now on."""
        with self._ended:
            self._over = True


_alive: set[Lifetime] = set()
# The loops of engines that became garbage and are about to end. The interpreter must wait for them, too: a
# thread that still frees tensors when it is gone aborts the process.
_ending: set[LoopThread] = set()
_use = EngineUse()
in_use = _use.call


def _end_all() -> None:
    """End every engine, once the program's threads use none.

    An engine computes on threads of executors, and those end before the interpreter waits for the program's
    own threads: one that still generates would find no engine. A second Ctrl-C ends the waiting.
    """
    with suppress(KeyboardInterrupt):
        _use.end()
    _use.stop()
    with suppress(KeyboardInterrupt):
        for lifetime in list(_alive):
            lifetime.end_with_program()
        for loop in list(_ending):
            loop.join(_PATIENCE_S)
        # Engines whose start was given up, and calls that were interrupted, have theirs still.
        join_daemons(_PATIENCE_S)


def _other_threads() -> list[threading.Thread]:
    """Return the threads that the interpreter is going to wait for, but for the workers of executors."""
    apart = (threading.current_thread(), threading.main_thread())
    return [
        thread
        for thread in threading.enumerate()
        if not thread.daemon and thread not in apart and thread not in executors._threads_queues
    ]


# What `concurrent.futures` registers itself with, and has before: calls come in reverse order. There is no
# public way to be called before the threads of executors end; without this one engines still end, only later.
_register = getattr(threading, "_register_atexit", atexit.register)
with suppress(RuntimeError):  # imported while the interpreter ends
    _register(_end_all)


T = TypeVar("T")

# Requests in the stack at a time, as a multiple of what runs at once: enough that no step lacks a sequence.
_AHEAD = 4
# A core that is told to end while it loads hears it at the next part of its start. Its thread is a daemon.
_GIVE_UP_S = 3.0
_AT_ONCE = Numbers(1, 2**31 - 1, whole=True)

_INSTEAD: dict[int, str] = {
    common_pb2.MODEL_TASK_GENERATE: "this model generates text: use generate, chat or beam_search (LLM(..., "
    'task="embed") has it give vectors)',
    common_pb2.MODEL_TASK_EMBED: "this model makes embeddings: use embed, score or encode",
    common_pb2.MODEL_TASK_SCORE: "this model scores pairs of texts: use score, classify or encode",
    common_pb2.MODEL_TASK_CLASSIFY: "this model classifies texts: use classify or encode",
}


class Calls:
    """A model in this process and the calls of it. Several threads may call it."""

    def __init__(
        self,
        model: str,
        options: Mapping[str, Any],
        chat_template: Path | None,
        *,
        progress: bool,
        loading: bool,
    ) -> None:
        """Load the model. Raises ValueError or RuntimeError, one line."""
        self._progress = progress
        with in_use(), StartProgress(model, shown=loading) as shown:
            # Here, where Ctrl-C is heard at once: to fetch or convert a model may take long.
            stack = LocalStack(model, options, chat_template, lambda line: shown.tell(line, None))
            loop = LoopThread("catenary-llm")
            self._lifetime = Lifetime(loop, stack)
            try:
                loop.run(stack.start(shown.tell))
            except BaseException as error:
                with suppress(Exception):
                    self._lifetime.close(_GIVE_UP_S)
                if isinstance(error, EngineStartError):
                    raise RuntimeError(str(error)) from None
                raise
        self._abandon = weakref.finalize(self, self._lifetime.abandon)
        # The end of the program does it in order, and waits.
        self._abandon.atexit = False

    def close(self) -> None:
        """End the engine and give its memory back. Idempotent."""
        self._abandon.detach()
        self._lifetime.close()

    @property
    def _stack(self) -> LocalStack:
        return self._lifetime.stack

    def _require(self, method: str, tasks: Collection[int]) -> None:
        """Raise ValueError if the model is for none of these tasks."""
        if self._stack.task not in tasks:
            raise ValueError(f"LLM.{method}: {_INSTEAD[self._stack.task]}")

    async def _many(
        self,
        requests: Sequence[Callable[[], Awaitable[T]]],
        use_tqdm: bool | None,
        at_once: int | None = None,
    ) -> list[T]:
        """Return the results of all, in order; some run at a time. The first error ends the others."""
        if at_once is not None:
            check_number("concurrency_limit", at_once, _AT_ONCE)
        if use_tqdm not in (None, True, False):
            raise TypeError(f"use_tqdm must be True, False or None, not {type(use_tqdm).__name__}")
        room = asyncio.Semaphore(at_once or _AHEAD * self._stack.max_running)
        shown = self._progress if use_tqdm is None else use_tqdm
        with BatchProgress(len(requests), shown=shown) as progress:

            async def one(request: Callable[[], Awaitable[T]]) -> T:
                async with room:
                    result = await request()
                progress.advance()
                return result

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(request)) for request in requests]
        return [task.result() for task in tasks]

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        with ExitStack() as use:
            try:
                use.enter_context(in_use())
            except RuntimeError:
                # It does not begin.
                work.close()
                raise
            try:
                return self._lifetime.loop.run(work)
            except (ApiError, BaseExceptionGroup) as error:
                raise _plain(error) from None


def _plain(error: BaseException) -> BaseException:
    """Return the Python exception for an HTTP error; of several errors that of the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, ApiError):
        return error
    return ValueError(error.message) if error.status < 500 else RuntimeError(error.message)
