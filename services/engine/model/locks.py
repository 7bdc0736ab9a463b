"""A lock between processes of one machine, held while a cache entry is made."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def exclusive(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Holds an exclusive lock on `path`; calls `on_wait` once if another process has it.

    The kernel drops the lock with its holder, so that a killed converter never blocks the next one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
