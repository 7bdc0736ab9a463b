"""What a follower of the prefix cache is told."""

from __future__ import annotations

import pytest

from services.engine.kv import BlockPool, Cleared, Removed, Stored


def test_events_tell_what_is_stored_removed_and_cleared() -> None:
    pool = BlockPool(2, 2, prefix_caching=True)
    table = pool.allocate(2)
    pool.publish(table[0], b"a")
    pool.publish(table[1], b"b")
    pool.free(table)
    pool.allocate(1)
    pool.clear_cache()
    assert pool.events.drain() == [
        Stored(1, b"a"),
        Stored(2, b"b"),
        Removed(3, b"b"),
        Cleared(4),
    ]
    assert pool.events.drain() == []
    assert (pool.events.number, pool.events.names()) == (4, [])


def test_hits_and_frees_are_no_events() -> None:
    pool = BlockPool(2, 2, prefix_caching=True)
    table = pool.allocate(1)
    pool.publish(table[0], b"a")
    pool.events.drain()
    pool.free(table)
    pool.acquire(pool.lookup([b"a"]))
    pool.free(table)
    assert pool.events.drain() == []


def test_an_overflow_is_a_gap_that_all_names_bridge() -> None:
    pool = BlockPool(5, 1, prefix_caching=True, event_capacity=2)
    table = pool.allocate(5)
    for block in table[:4]:
        pool.publish(block, bytes([block]))
    # The next number that the consumer expects is 1.
    assert [event.sequence_number for event in pool.events.drain()] == [3, 4]
    assert pool.events.number == 4
    assert set(pool.events.names()) == {bytes([block]) for block in table[:4]}
    pool.publish(table[4], b"next")
    assert [event.sequence_number for event in pool.events.drain()] == [5]


def test_a_log_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one event, not 0"):
        BlockPool(4, 1, event_capacity=0)
