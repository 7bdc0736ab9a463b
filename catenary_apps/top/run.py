"""Run `catenary top`: poll the routers and draw frames until the user quits."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pydantic import Field

from catenary.config import settings
from catenary.runtime import StartRefused
from catenary_apps.cli.output import load_options, refused
from catenary_apps.cli.router_options import RoutersOptions

if TYPE_CHECKING:
    from rich.console import Console

    from catenary_apps.top.frame import Frame

_NAME = "catenary top"
# Characters a line where no terminal says how many there are.
_PIPE_WIDTH = 120


class TopConfig(RoutersOptions):
    """Which routers to watch, and how often."""

    model_config = settings(prefix="CATENARY_TOP_")

    interval: float = Field(1.0, ge=0.1, le=3_600, description="Seconds between two frames.")
    once: bool = Field(False, description="Print one frame and end.")


@contextmanager
def quit_keys(over: asyncio.Event) -> Iterator[None]:
    """Set `over` at the key q or at a signal. For a coroutine; signals only where that is the main thread."""
    loop = asyncio.get_running_loop()
    main = threading.current_thread() is threading.main_thread()
    signals = (signal.SIGINT, signal.SIGTERM) if main else ()
    for number in signals:
        loop.add_signal_handler(number, over.set)
    try:
        with _keyboard(loop, over):
            yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


@contextmanager
def _keyboard(loop: asyncio.AbstractEventLoop, over: asyncio.Event) -> Iterator[None]:
    if not sys.stdin.isatty():
        yield
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def typed() -> None:
        keys = os.read(keyboard, 64)
        if b"q" in keys.lower():
            over.set()
        elif not keys:
            # The terminal is gone.
            loop.remove_reader(keyboard)
            over.set()

    tty.setcbreak(keyboard)
    try:
        loop.add_reader(keyboard, typed)
        yield
    finally:
        loop.remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def run_top(argv: Sequence[str]) -> int:
    """Run `catenary top`: 0 when one leaves it; with --once, 1 if a router is away; 2 for wrong options.

    Rich ends the process with 1, silently, once the reader of the pipe is gone.
    """
    config = load_options(TopConfig, argv, prog=_NAME)
    try:
        return asyncio.run(_watch(config))
    except StartRefused as error:
        return refused(_NAME, error)


async def _watch(config: TopConfig) -> int:
    # Not before: a wrong option is to be refused without waiting for gRPC to load.
    from catenary_apps.cli.routers import RouterPoller, find_routers
    from catenary_apps.top.frame import Rates, make_frame

    console, over, rates = _console(), asyncio.Event(), Rates()
    async with RouterPoller(find_routers(config), timeout_s=config.timeout) as poller:
        if config.once:
            frame = make_frame(await poller.poll(), rates)
            _print(frame, console)
            return 0 if frame.complete else 1
        with quit_keys(over), _Screen(console) as screen:
            leaving = asyncio.create_task(over.wait())
            while not leaving.done():
                polling = asyncio.create_task(poller.poll())
                await asyncio.wait((polling, leaving), return_when=asyncio.FIRST_COMPLETED)
                if leaving.done():
                    polling.cancel()
                    await asyncio.wait((polling,))
                    break
                screen.show(make_frame(polling.result(), rates))
                await asyncio.wait((leaving,), timeout=config.interval)
    return 0


class _Screen:
    """Frames in place on a terminal, one after the other elsewhere."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._live = Live(console=console, screen=True, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> _Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, frame: Frame) -> None:
        from catenary_apps.top.table import draw

        if self._live is None:
            _print(frame, self._console)
            self._console.print()
        else:
            self._live.update(draw(frame, self._console, height=self._console.height), refresh=True)


def _print(frame: Frame, console: Console) -> None:
    from catenary_apps.top.table import draw

    console.print(draw(frame, console))


def _console() -> Console:
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal without Unicode shows a question mark where a name has other letters.
        sys.stdout.reconfigure(errors="replace")
    if sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown"):
        return Console()
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isascii() and columns.isdigit() and int(columns) > 0 else _PIPE_WIDTH
    # Whatever FORCE_COLOR says: no escape codes into pipes and files.
    return Console(force_terminal=False, color_system=None, width=width)
