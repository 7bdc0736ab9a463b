"""Makes the model ready to serve before any service starts: a bad one is refused in one line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

from catenary.config import ConfigError
from catenary.memory import MemoryWatch
from catenary.runtime import StartRefused, module_command
from catenary_apps.up.child import wrapped
from catenary_apps.up.plan import without_secrets
from catenary_apps.up.process import LINE_LIMIT, lines_of
from catenary_apps.up.supervisor import describe_exit

# Begins the last line of a process that could not prepare the model.
REFUSAL_PREFIX = "error: "
# Of a line that is shown: libraries write warnings of any length, and a person reads a line of a terminal.
_SHOWN_CHARS = 1000


def served_name(model: str, configured: str | None) -> str:
    """Return the name that requests use: the configured one, or the engine's default for a prepared model."""
    if configured:
        return configured
    from services.engine.model import resolve_source

    return resolve_source(model).name


async def prepare_model(model: str, cache: Path, report: Callable[[str], None], *, convert_s: float) -> Path:
    """Return the directory of the model, converted (in at most `convert_s` seconds) or fetched if need be.

    Runs in a process of its own, since it may import torch. Raises StartRefused with the reason that the
    process gave in its last line. Long lines are shown cut off.
    """
    program, *module = module_command("services.engine.model.prepare")
    # Its package imports it, which runpy warns about.
    quiet = ("-W", "ignore::RuntimeWarning:runpy")
    options = ("--model", model, "--cache-dir", str(cache), "--convert-timeout-s", str(convert_s))
    memory = MemoryWatch()
    process = await asyncio.create_subprocess_exec(
        *wrapped((program, *quiet, *module, *options)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=LINE_LIMIT,
        # Ctrl-C is for `catenary up`; children of the process are killed with its group.
        start_new_session=True,
        env=without_secrets(os.environ) | {"PYTHONUNBUFFERED": "1"},
    )
    stdout, stderr = process.stdout, process.stderr
    if stdout is None or stderr is None:
        raise RuntimeError("the process was started without pipes")
    last_line = refusal = ""

    async def follow() -> None:
        nonlocal last_line, refusal
        async for text in lines_of(stderr):
            line = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
            if line.startswith(REFUSAL_PREFIX):
                # Told once, with the exception below.
                refusal = line.removeprefix(REFUSAL_PREFIX)
            elif line:
                last_line = line
                report(line)

    try:
        output, _ = await asyncio.gather(stdout.read(), follow())
        code = await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    lines = output.decode(errors="replace").split("\n")
    directory = next((line.strip() for line in reversed(lines) if line.strip()), "")
    if code or not directory:
        # Its last activity is no reason: it may have been killed during it.
        end = describe_exit(code, memory=memory)
        doing = f" while: {last_line}" if last_line else ""
        if refusal and code == ConfigError.exit_code:
            raise ConfigError(f"--model: {refusal}")
        raise StartRefused(refusal or f"the model {model} could not be prepared: the process {end}{doing}")
    return Path(directory)
