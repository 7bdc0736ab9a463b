"""Libraries that are kept: whose they are, and whether they are still what was built.

A library ends with a digest of its name and of all before it, which loaders do not look at. A file that was
cut off, overwritten or renamed has another one: to load it would end the process at worst.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from catenary.directories import NoHomeError, cache_directory, forbids_code
from catenary.telemetry import get_logger
from services.engine.device.cpu.native.compiler import BuildError

log = get_logger(__name__)

# Libraries that stay in the cache, of all versions together.
_KEPT = 32
_DIGEST_BYTES = hashlib.sha256().digest_size


def kernel_directory(cache: Path | None) -> Path:
    """Where libraries are kept, below Catenary's cache: `cache`, `$CATENARY_CACHE` or ~/.cache/catenary.

    Raises BuildError for a user without a home, as a container may have one.
    """
    if cache is not None:
        return cache / "native"
    try:
        return cache_directory() / "native"
    except NoHomeError as error:
        raise BuildError(str(error)) from None


def seal(library: Path, name: str) -> None:
    """Puts the digest behind a library that is to be kept as `name`, which no other user may change then."""
    with library.open("r+b") as file:
        digest = _digest(name, file.read())
        file.write(digest)
    # Whatever the umask: with the one of many systems the user's group may write to new files.
    library.chmod(0o755)


def make_directory(directory: Path) -> None:
    """Makes it for this user alone, if it is not there; its parents, as the umask says."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)


def sound(places: Sequence[Path], pattern: str) -> list[Path]:
    """Libraries of these directories that are whole, can be loaded, and are no other user's."""
    usable = (place for place in places if is_ours(place) and not forbids_code(place))
    found = (path for place in usable for path in sorted(place.glob(pattern)))
    return [path for path in found if is_ours(path) and _is_whole(path)]


def is_ours(path: Path) -> bool:
    """Whether this user or root owns the path, and neither its group nor others may write to it."""
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def drop_the_oldest(directory: Path) -> None:
    """Every version of the sources leaves its libraries here; the cache must not grow for ever."""
    libraries = sorted(directory.glob("*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
    for library in libraries[_KEPT:]:
        library.unlink(missing_ok=True)


def _is_whole(path: Path) -> bool:
    try:
        data = path.read_bytes()
    except OSError:
        return False
    whole = data[-_DIGEST_BYTES:] == _digest(path.name, data[:-_DIGEST_BYTES])
    if not whole:
        log.warning("a library of the CPU's kernels is damaged and not used", path=str(path))
    return whole


def _digest(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + content).digest()
