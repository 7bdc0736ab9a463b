"""Compiled code on disk, checked before use: a damaged library ends the process that loads it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import IO

from catenary.telemetry import get_logger

log = get_logger(__name__)

_MANIFEST = "manifest.json"
_LOCK = "lock"

Digests = dict[str, tuple[int, str]]


class CodeCache:
    """A directory whose files are listed, with their digests, in a manifest that `seal` writes.

    `code` is where the compiler keeps its files. Several engines share one: each holds a lock while it lives,
    and only the first to come checks.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.code = directory / "code"
        self._lock: IO[str] | None = None

    def open(self) -> bool:
        """Take the cache into use. False if it was damaged, and was therefore emptied. Raises OSError."""
        self.code.mkdir(parents=True, exist_ok=True)
        self._lock = (self._directory / _LOCK).open("a")
        sound = True
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # Another engine uses it: what is there was checked, and what is new is being written.
            log.debug("the compile cache is in use, and not checked again")
        else:
            sound = self._check()
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        return sound

    def seal(self) -> None:
        """List what the compiler has written: only that is kept at the next start."""
        partial = self._directory / f"{_MANIFEST}.{os.getpid()}"
        try:
            partial.write_text(json.dumps(_digests(self.code)))
            partial.replace(self._directory / _MANIFEST)
        except OSError as error:
            log.warning("compiled code is not kept for the next start", reason=str(error))

    def close(self) -> None:
        """Let other processes check the cache."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _check(self) -> bool:
        listed = self._manifest()
        found = _digests(self.code)
        if listed is None or any(found.get(name) != digest for name, digest in listed.items()):
            log.warning("the compile cache is damaged: it is removed and built anew", files=len(found))
            self._empty()
            return False
        # What a start that was cut short has left may be half a file.
        for name in found.keys() - listed.keys():
            (self.code / name).unlink()
        return True

    def _manifest(self) -> Digests | None:
        """Return the list; empty for a new cache; None if it cannot be read."""
        try:
            content = json.loads((self._directory / _MANIFEST).read_text())
            return {str(name): (int(size), str(digest)) for name, (size, digest) in content.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError):
            return None

    def _empty(self) -> None:
        shutil.rmtree(self.code)
        self.code.mkdir()
        (self._directory / _MANIFEST).unlink(missing_ok=True)


def _digests(root: Path) -> Digests:
    """Size and digest of every file below a directory, by relative path."""
    digests: Digests = {}
    for path in root.rglob("*"):
        # The compiler's own locks are empty and come and go.
        if path.is_file() and path.suffix != ".lock":
            data = path.read_bytes()
            digests[str(path.relative_to(root))] = len(data), hashlib.blake2b(data).hexdigest()
    return digests
