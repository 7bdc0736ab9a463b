"""An event loop in a thread of its own, for programs that have none."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for callers that wait for them. Any number of threads may call."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        # A program that ends without closing it must not hang on it.
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether nothing can be run any more."""
        return self._loop.is_closed()

    def run(self, work: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T:
        """Return the result of `work`. Ctrl-C cancels it.

        Raises its errors, RuntimeError once closed, and TimeoutError after `timeout_s`.
        """
        if self.closed:
            work.close()
            raise RuntimeError("it is closed already")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except (KeyboardInterrupt, TimeoutError):
            future.cancel()
            raise

    def end_with(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `work` and then end the thread, without waiting: finalizers may run on any thread."""

        async def last() -> None:
            try:
                await work()
            finally:
                self._loop.stop()

        def begin() -> None:
            self._last = self._loop.create_task(last())

        with suppress(RuntimeError):  # it is closed already
            self._loop.call_soon_threadsafe(begin)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the thread has ended, for `timeout_s` at most."""
        self._thread.join(timeout_s)

    def close(self) -> None:
        """End the thread; what still runs is left as it is. Idempotent."""
        with suppress(RuntimeError):  # it is closed already
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run_loop(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()


_daemons: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def daemon_thread(work: Callable[[], object], *, name: str) -> threading.Thread:
    """Return a thread that has begun `work`, and whose end the interpreter does not wait for by itself.

    Nor may the interpreter end during it, if it computes in native code: a thread that comes back from there
    finds no interpreter, and glibc's way to end it aborts the process where frames of C++ or Rust are on its
    stack. See `join_daemons`.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    _daemons.add(thread)
    thread.start()
    return thread


def join_daemons(timeout_s: float) -> bool:
    """Wait for the threads of `daemon_thread`, `timeout_s` in all at most; whether all have ended."""
    until_s = time.monotonic() + timeout_s
    threads = [thread for thread in _daemons if thread is not threading.current_thread()]
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def in_daemon_thread(work: Callable[[], T], *, name: str) -> asyncio.Future[T]:
    """Return a future of `work`, which runs on a thread of its own. Call this on a running loop.

    The end of the interpreter does not wait for that thread. It does for those of `asyncio.to_thread`, and
    refuses to start more of them while it waits for a program's other threads.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:
            failure = error
        with suppress(RuntimeError):  # the loop is closed: there is no one to tell
            loop.call_soon_threadsafe(tell, result, failure)

    daemon_thread(run, name=name)
    return future
