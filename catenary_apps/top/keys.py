"""Ends a live view at `q`, Ctrl-C or SIGTERM, and leaves the terminal as it was."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager


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
