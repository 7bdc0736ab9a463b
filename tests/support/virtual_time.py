"""An event loop whose clock is the test's: a wait takes no time, and a standstill is one call."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

P = ParamSpec("P")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Jumps to the next timer whenever nothing else is to be done; waits for its threads in real time."""

    def __init__(self) -> None:
        self._now = 0.0
        self._threads = 0
        super().__init__(_Selector(self))

    def time(self) -> float:
        """Return the seconds since the loop was made, by its own clock."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass without a turn of the loop, as if the process had been stopped."""
        self._now += seconds

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        """Count the call as running, so that no timer fires before its result is there."""
        self._threads += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._returned)
        return future

    def skips(self) -> bool:
        """Whether a wait may be skipped."""
        return not self._threads

    def _returned(self, _future: object) -> None:
        self._threads -= 1


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or not self._loop.skips():
            return super().select(timeout)
        ready = super().select(0)
        if not ready:
            self._loop.advance(max(timeout, 0))
        return ready


def virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an async test on a loop with virtual time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


def stand_still(seconds: float) -> None:
    """Let the clock of the running loop pass as if the process had been stopped for so long."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop.advance(seconds)
