"""Room for connections."""

from __future__ import annotations

import pytest

from gateway.http.closing import MAX_TURNED_AWAY, Room


@pytest.mark.parametrize(("limit", "reserve"), [(64, 8), (256, 32), (1024, 64), (1 << 20, 64)])
def test_descriptors_are_kept_for_files_and_services(limit: int, reserve: int) -> None:
    room = Room(4096, lambda: limit)
    assert room.refusal(1, limit - reserve - 1) is None
    refusal = room.refusal(1, limit - reserve)
    assert refusal is not None
    assert (refusal.status, refusal.code) == (503, "too_many_connections")
    assert dict(refusal.headers())[b"retry-after"] == b"1"
    assert str(limit) in refusal.message
    assert room.can_tell(limit - reserve)
    assert not room.can_tell(limit - 1)


def test_without_a_limit_any_descriptor_will_do() -> None:
    assert Room(4096, lambda: -1).refusal(1, 1 << 40) is None


def test_those_that_are_turned_away_take_no_place() -> None:
    room = Room(2, lambda: 1024)
    assert room.refusal(2, 10) is None
    assert room.refusal(3, 10) is not None
    room.turned_away = 1
    assert room.refusal(3, 10) is None
    assert room.can_tell(10)
    room.turned_away = MAX_TURNED_AWAY
    assert not room.can_tell(10)
