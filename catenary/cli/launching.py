"""Starts `catenary up` for somebody who asked for it in vLLM's words."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from catenary.config import ConfigError
from catenary.migration import ENGINE_PREFIX, Launch, Row

RECIPES = f"{ENGINE_PREFIX}RECIPE_CACHE"


def start(program: str, make: Callable[[], Launch], *, dry: bool) -> int:
    """Say what is done and do it; with `dry` only say it. A refusal is one line and exit code 2."""
    try:
        launch = make()
        variables = launch.variables(os.environ)
        if not dry:
            _make_cache(variables.get(RECIPES, ""))
    except ConfigError as error:
        sys.stderr.write(f"{program}: {error}\n")
        return error.exit_code
    for line in launch.warnings:
        print(f"warning: {line}")
    for line in launch.notes:
        print(line)
    print(f"this is: {launch.command(variables)}", flush=True)
    if dry:
        return 0
    from catenary.cli.up import run_up

    flags = launch.flags(variables)
    os.environ.update(variables)
    return run_up(flags)


def _make_cache(directory: str) -> None:
    """Make the recipe cache's directory. Raises ConfigError if it cannot be made."""
    if not directory:
        return
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the recipe cache {directory} cannot be made: {error.strerror}") from None


def table(rows: Iterable[Row]) -> str:
    """Rows as lines for --help."""
    lines = []
    for row in rows:
        names = ", ".join(row.names)
        lines.append(f"  {names}\n      {row.status.value}: {row.note.replace('`', '')}")
    return "\n".join(lines) + "\n"
