"""Where `catenary up` keeps models and logs."""

from __future__ import annotations

import tempfile
from pathlib import Path

from catenary import directories
from catenary.config import ConfigError


def cache_directory(configured: Path | None) -> Path:
    """Return the directory of prepared models and logs. Raises StartRefused."""
    try:
        return directories.cache_directory() if configured is None else directories.expanded(configured)
    except directories.NoHomeError as error:
        raise ConfigError(f"{error}, or give --cache-dir") from None


def require_writable(directory: Path, option: str) -> None:
    """Make a directory and see that files can be written in it. Raises StartRefused that names the option."""
    try:
        directory = directories.expanded(directory)
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except directories.NoHomeError as error:
        raise ConfigError(f"--{option}: {error}") from None
    except OSError as error:
        raise ConfigError(f"--{option}: {directory} cannot be written: {error.strerror}") from None
