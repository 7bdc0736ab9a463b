"""Mapped memory of the CPU device."""

from __future__ import annotations

import mmap

import pytest

from services.engine.device.cpu.packing import map_zeros


@pytest.mark.parametrize("advice", [None, 12345])
def test_mapped_memory_is_zeroed_and_aligned(advice: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if advice is not None:
        # As the kernel answers that has no huge pages: with EINVAL.
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", advice, raising=False)
    one, other = map_zeros(3 << 20), map_zeros(1)
    assert (len(one), len(other)) == (3 << 20, 1)
    assert one.data_ptr() % mmap.PAGESIZE == 0
    one[-1] = 7
    assert one[:-1].count_nonzero() == 0
    assert other[0] == 0
