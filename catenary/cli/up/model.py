"""Makes the model ready to serve before any service starts: a bad one is refused in one line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

from catenary.cli.up.child import wrapped
from catenary.cli.up.plan import without_secrets
from catenary.cli.up.supervisor import describe_exit
from catenary.memory_deaths import MemoryWatch
from catenary.runtime import StartRefused, module_command

LINE_LIMIT = 1 << 20
# What the process begins its last words with.
REFUSAL_PREFIX = "error: "


def served_name(model: str, configured: str | None) -> str:
    """Return the name that requests use: the configured one, or the engine's default for a prepared model."""
    if configured:
        return configured
    from services.engine.model import resolve_source

    return resolve_source(model).name


async def prepare_model(model: str, cache: Path, report: Callable[[str], None]) -> Path:
    """Return the directory of the model, converted or fetched first where that is needed.

    Runs in a process of its own, since it may import torch. Raises StartRefused with its last words.
    """
    program, *module = module_command("services.engine.model.prepare")
    # Its package imports it, which runpy warns about.
    quiet = ("-W", "ignore::RuntimeWarning:runpy")
    memory = MemoryWatch()
    process = await asyncio.create_subprocess_exec(
        *wrapped((program, *quiet, *module, "--model", model, "--cache-dir", str(cache))),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=LINE_LIMIT,
        # Ctrl-C is for `catenary up`, and what the process spawns ends with it.
        start_new_session=True,
        env=without_secrets(os.environ) | {"PYTHONUNBUFFERED": "1"},
    )
    stdout, stderr = process.stdout, process.stderr
    if stdout is None or stderr is None:
        raise RuntimeError("the process was started without pipes")
    last_line = refusal = ""

    async def follow() -> None:
        nonlocal last_line, refusal
        async for raw in stderr:
            line = raw.decode(errors="replace").strip()
            if line.startswith(REFUSAL_PREFIX):
                # Told once, by the one who catches it.
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
        # What it did last is no reason: it may have been ended meanwhile.
        end = describe_exit(code, memory=memory)
        doing = f" while: {last_line}" if last_line else ""
        raise StartRefused(refusal or f"the model {model} could not be prepared: the process {end}{doing}")
    return Path(directory)
