"""Options, refusals and files of commands that print a result."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from catenary.config import ConfigError, ServiceConfig, load
from catenary.runtime import StartRefused

T = TypeVar("T", bound=ServiceConfig)

# How to get what `catenary bench` and pictures need: the project is on no package index.
INSTALL_BENCH = "pip install '.[bench]' in a clone of the repository"


def load_options(cls: type[T], argv: Sequence[str], *, prog: str) -> T:
    """Load as `catenary.config.load`, with --json short for --format=json."""
    return load(cls, ["--format=json" if word == "--json" else word for word in argv], prog=prog)


def refused(program: str, error: StartRefused | ValueError) -> int:
    """Say in one line on stderr why a command is refused. Return its exit code."""
    print(f"{program}: {error}", file=sys.stderr)
    return error.exit_code if isinstance(error, StartRefused) else 2


def counted(number: int, noun: str) -> str:
    """Return a number and its noun, in the plural where it is not one."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def file_in(path: Path, name: str, started: datetime) -> Path:
    """Return the file that is meant by `path`: in a directory one of this name and the time of the start."""
    return path / f"{name}-{started:%Y%m%d-%H%M%S}.json" if path.is_dir() else path


def check_file(path: Path, option: str) -> None:
    """Check that the file that an option names can be written, before what it is to hold costs time. Raises
    ConfigError, one line."""
    where = path.absolute()
    if path.is_dir():
        raise ConfigError(f"{option} {path} cannot be written: it is a directory")
    if not where.parent.is_dir():
        raise ConfigError(f"{option} {path} cannot be written: there is no such directory")
    if not os.access(path if path.exists() else where.parent, os.W_OK):
        raise ConfigError(f"{option} {path} cannot be written: Permission denied")


def write_file(path: Path, data: bytes, option: str) -> None:
    """Write the file that an option names. Raises StartRefused, one line, if that is not possible."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise StartRefused(f"{option} {path} cannot be written: {error.strerror}") from None
