"""What commands that print a result and write files have in common."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from catenary.config import ServiceConfig, load

T = TypeVar("T", bound=ServiceConfig)


def load_options(cls: type[T], argv: Sequence[str], *, prog: str) -> T:
    """As `catenary.config.load`, where --json is short for --format=json."""
    return load(cls, ["--format=json" if word == "--json" else word for word in argv], prog=prog)


def check_file(path: Path, option: str) -> None:
    """Whether the file that an option names could be written, before what it is to hold costs time. Raises
    ValueError, one line."""
    where = path.absolute()
    if path.is_dir():
        raise ValueError(f"{option} {path} cannot be written: it is a directory")
    if not where.parent.is_dir():
        raise ValueError(f"{option} {path} cannot be written: there is no such directory")
    if not os.access(path if path.exists() else where.parent, os.W_OK):
        raise ValueError(f"{option} {path} cannot be written: Permission denied")


def write_file(path: Path, data: bytes, option: str) -> None:
    """Writes the file that an option names. Raises ValueError, one line, if that is not possible."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written: {error.strerror}") from None
