"""The disks that the tests of this directory use."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from tests.support.small_disk import SmallDisk


def test_a_small_disk_is_full_and_has_room_again(small_disk: Callable[[int], SmallDisk]) -> None:
    disk = small_disk(1 << 20)
    disk.fill()
    with pytest.raises(OSError) as full:
        (disk.path / "file").write_bytes(b"x")
    assert full.value.errno == errno.ENOSPC
    disk.relieve()
    (disk.path / "file").write_bytes(b"x")
    with disk.read_only(), pytest.raises(OSError) as refused:
        (disk.path / "file").write_bytes(b"x")
    assert refused.value.errno == errno.EROFS
