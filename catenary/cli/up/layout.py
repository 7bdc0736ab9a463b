"""Where `catenary up` keeps models and logs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from catenary.runtime import StartRefused


def cache_directory(configured: Path | None) -> Path:
    """Return the directory of prepared models and logs."""
    if configured is not None:
        return configured.expanduser()
    return Path(os.environ.get("CATENARY_CACHE") or "~/.cache/catenary").expanduser()


def require_writable(directory: Path, option: str) -> None:
    """Make a directory and see that files can be written in it. Raises StartRefused that names the option."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise StartRefused(f"--{option}: {directory} cannot be written: {error.strerror}") from None
