"""Disks that are small, full, or read-only, for tests of what a service does on one."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import pytest

BALLAST = "ballast"


class SmallDisk:
    """A mounted file system that has nothing else on it, with room for a known number of bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        """Where it is mounted."""

    @property
    def free(self) -> int:
        """Bytes that are left."""
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize

    def fill(self, leave: int = 0) -> None:
        """Put as much into a file as leaves `leave` bytes, or less than a page more."""
        with (self.path / BALLAST).open("ab", buffering=0) as file:
            try:
                while (room := self.free - leave) > 0:
                    file.write(bytes(min(room, 1 << 20)))
            except OSError:
                return

    def relieve(self) -> None:
        """Take away what `fill` has put there."""
        (self.path / BALLAST).unlink(missing_ok=True)

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """Refuse writes meanwhile. Files that are open for writing must be closed."""
        _mount("-o", "remount,ro", str(self.path))
        try:
            yield
        finally:
            _mount("-o", "remount,rw", str(self.path))


@contextmanager
def mounted(size: int, *options: str) -> Iterator[SmallDisk]:
    """A disk of `size` bytes in memory, with these options of mount(8).

    Skips the test where none can be mounted."""
    if reason := why_not():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="cat-disk-") as place, ExitStack() as stack:
        _mount("-t", "tmpfs", "-o", ",".join((f"size={size}", "mode=0700", *options)), "tmpfs", place)
        # Lazily: a service that a failed test left behind must not keep it mounted.
        stack.callback(subprocess.run, ["umount", "-l", place], check=False)
        yield SmallDisk(Path(place))


@cache
def why_not() -> str:
    """The reason for which no disk can be mounted here; empty if one can be."""
    with tempfile.TemporaryDirectory(prefix="cat-disk-") as place:
        try:
            _mount("-t", "tmpfs", "-o", "size=64k", "tmpfs", place)
        except (OSError, subprocess.CalledProcessError):
            return "no file system can be mounted here: that needs root's CAP_SYS_ADMIN"
        subprocess.run(["umount", "-l", place], check=True)
    return ""


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)
