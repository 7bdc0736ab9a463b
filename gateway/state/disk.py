"""The disk of the state directory: how much room there is, and some that is kept for when there is none."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

NAME = "reserve"
RESERVE_BYTES = 4 << 20
_PART_OF_DISK = 16


class Disk:
    """What several processes and databases that share the directory see of it.

    A file keeps some of its room. On a full disk nothing could be deleted any more, and no database opened:
    both write a little first. Then the file is given up; it is made again once there is room."""

    def __init__(self, directory: Path, reserve_bytes: int = RESERVE_BYTES) -> None:
        """`reserve_bytes`: of the file; on a small disk it has less, and with 0 there is none."""
        self._directory = directory
        self._reserve = directory / NAME
        self._bytes = reserve_bytes

    def free(self) -> int:
        """Bytes that this user may still write. Raises OSError."""
        status = os.statvfs(self._directory)
        return status.f_bavail * status.f_frsize

    def reserve(self) -> int:
        """Bytes that the reserve has when it is there. Raises OSError."""
        status = os.statvfs(self._directory)
        return min(self._bytes, status.f_blocks * status.f_frsize // _PART_OF_DISK)

    def keep(self) -> None:
        """Make the reserve, unless it is there or would take most of what is left."""
        with suppress(OSError):
            size = self.reserve()
            if size <= 0 or (self._reserve.exists() and self._reserve.stat().st_size >= size):
                return
            if self.free() < 2 * size:
                return
            file = os.open(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.posix_fallocate(file, 0, size)
            finally:
                os.close(file)

    def give_up(self) -> None:
        """Remove the reserve, so that the next write has its room."""
        with suppress(OSError):
            self._reserve.unlink()
