"""`catenary top`: asks, draws, waits, until one has seen enough."""

from __future__ import annotations

import asyncio
import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from catenary.runtime import StartRefused
from catenary_apps.cli.output import load_options
from catenary_apps.top.config import TopConfig

if TYPE_CHECKING:
    from rich.console import Console

    from catenary_apps.top.frame import Frame

_NAME = "catenary top"
# Characters a line where no terminal says how many there are.
_PIPE_WIDTH = 120


def run_top(argv: Sequence[str]) -> int:
    """Run `catenary top`: 0 when one leaves it; with --once, 1 if a router is away; 2 for wrong options.

    Rich ends the process with 1, silently, once nobody reads the pipe.
    """
    config = load_options(TopConfig, argv, prog=_NAME)
    try:
        return asyncio.run(_watch(config))
    except StartRefused as error:
        print(f"{_NAME}: {error}", file=sys.stderr)
        return error.exit_code


async def _watch(config: TopConfig) -> int:
    # Not before: a wrong option is to be refused without waiting for gRPC to load.
    from catenary_apps.cli.router_polling import RouterPoller
    from catenary_apps.cli.router_target import find_routers
    from catenary_apps.top.frame import make_frame
    from catenary_apps.top.keys import quit_keys
    from catenary_apps.top.rates import Rates

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
        from catenary_apps.top.show import draw

        if self._live is None:
            _print(frame, self._console)
            self._console.print()
        else:
            self._live.update(draw(frame, self._console, height=self._console.height), refresh=True)


def _print(frame: Frame, console: Console) -> None:
    from catenary_apps.top.show import draw

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
