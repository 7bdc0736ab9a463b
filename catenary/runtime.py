"""How a service's process runs: one uvloop, two signals, one exit code, no memory kept that is free, all file
descriptors that the system allows."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from catenary.memory import give_memory_back
from catenary.standard_streams import open_standard_streams

FORCED_EXIT_CODE = 130
# Beyond what Linux allows by default (fs.nr_open) no limit can be set, an unlimited one neither.
MOST_DESCRIPTORS = 1 << 20


class StartRefused(Exception):
    """The process cannot start, for a reason that its operator can mend. The text is one line."""

    exit_code = 1


def module_command(module: str) -> tuple[str, ...]:
    """Return the command line of `python -m module` for a child process.

    Nothing is imported from the working directory, whose json.py or gateway/ may be anybody's, unless this
    process itself imports our packages from there: in a checkout that is not installed.
    """
    ours = str(Path(__file__).resolve().parents[1])
    safe = () if os.getcwd() == ours and sys.path[0] in ("", ours) else ("-P",)
    return (sys.executable, *safe, "-m", module)


def mark_started() -> None:
    """Move all that start-up made out of the garbage collector's sight: scanning it costs pauses."""
    gc.collect()
    gc.freeze()


def raise_descriptor_limit() -> None:
    """Let this process, and those that it starts, open as many files and sockets as the system allows it.

    The usual soft limit of 1024 is for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return
    # A sandbox may forbid it; then the limit stays.
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def run(main: Callable[[asyncio.Event], Coroutine[Any, Any, int | None]]) -> NoReturn:
    """Run a service until it returns, and exit the process with its code (None: 0).

    The first SIGTERM, SIGINT or SIGHUP sets the event that `main` was given; a second one exits with 130 at
    once. A SIGHUP that is ignored, as nohup does it, stays so.
    `StartRefused`, alone or inside an exception group, becomes its one line on stderr and its exit code.
    """
    open_standard_streams()
    raise_descriptor_limit()
    # Not above: commands that only read this module's names need no loop.
    import uvloop  # noqa: PLC0415

    try:
        code = uvloop.run(_supervised(main))
    except (StartRefused, BaseExceptionGroup) as error:
        refusal = _find_refusal(error)
        if refusal is None:
            raise
        sys.stderr.write(f"{_program()}: {refusal}\n")
        sys.exit(refusal.exit_code)
    sys.exit(code or 0)


async def _supervised(main: Callable[[asyncio.Event], Coroutine[Any, Any, int | None]]) -> int | None:
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            # The operator does not want to wait for the drain: no handler, no destructor may hold this up.
            os._exit(FORCED_EXIT_CODE)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue
        loop.add_signal_handler(number, on_signal)
    memory = asyncio.create_task(give_memory_back())
    try:
        return await main(stop)
    finally:
        memory.cancel()


def _find_refusal(error: BaseException) -> StartRefused | None:
    if isinstance(error, StartRefused):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next((found for inner in error.exceptions if (found := _find_refusal(inner))), None)
    return None


def _program() -> str:
    """Return `catenary` for a script, `services.router` for `python -m services.router`."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name).removesuffix(".__main__")
    return os.path.basename(sys.argv[0]) or "catenary"
