"""How long an offline engine lives: until it is closed, is garbage, or the program ends."""

from __future__ import annotations

import atexit
import concurrent.futures.thread as executors
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from catenary.loop_thread import LoopThread, join_daemons
from catenary_apps.llm.stack import LocalStack

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


class _Use:
    """How many calls of engines run now, and when the last one ended."""

    def __init__(self) -> None:
        self._ended = threading.Condition()
        self._running = 0
        self._ended_s = 0.0
        self._over = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call, from its begin to its end. Raises RuntimeError once the program ends.

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
                left_s = max(begun_s, self._ended_s) + _QUIET_S - time.monotonic()
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
_use = _Use()
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
    """The threads that the interpreter is going to wait for, but for the workers of executors."""
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
