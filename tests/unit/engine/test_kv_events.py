"""What a follower of the prefix cache is told."""

from __future__ import annotations

import pytest

from services.engine.kv import BlockPool, Cleared, KvSnapshot, Removed, Stored


def test_events_tell_what_is_stored_removed_and_cleared() -> None:
    pool = BlockPool(2, 2, prefix_caching=True)
    table = pool.allocate(2)
    pool.publish(table[0], b"a", None, [1, 2])
    pool.publish(table[1], b"b", b"a", [3, 4])
    pool.free(table)
    pool.allocate(1)
    pool.clear_cache()
    assert pool.events.drain() == [
        Stored(1, b"a", None, (1, 2), 2),
        Stored(2, b"b", b"a", (3, 4), 2),
        Removed(3, b"b"),
        Cleared(4),
    ]
    assert pool.events.drain() == []
    assert pool.events.snapshot() == KvSnapshot(4, ())


def test_hits_and_frees_are_no_events() -> None:
    pool = BlockPool(2, 2, prefix_caching=True)
    table = pool.allocate(1)
    pool.publish(table[0], b"a", None, [1, 2])
    pool.events.drain()
    pool.free(table)
    pool.acquire(pool.lookup([b"a"]))
    pool.free(table)
    assert pool.events.drain() == []


def test_an_overflow_is_a_gap_that_a_snapshot_bridges() -> None:
    pool = BlockPool(5, 1, prefix_caching=True, event_capacity=2)
    table = pool.allocate(5)
    for block in table[:4]:
        pool.publish(block, bytes([block]), None, [block])
    # The next number that the consumer expects is 1.
    assert [event.sequence_number for event in pool.events.drain()] == [3, 4]
    snapshot = pool.events.snapshot()
    assert snapshot.sequence_number == 4
    assert {block.block_hash for block in snapshot.blocks} == {bytes([block]) for block in table[:4]}
    pool.publish(table[4], b"next", None, [4])
    assert [event.sequence_number for event in pool.events.drain()] == [5]


def test_a_snapshot_names_parents_first_even_if_they_were_stored_again() -> None:
    pool = BlockPool(4, 1, prefix_caching=True)
    a, b, c = pool.allocate(3)
    pool.publish(b, b"b", b"a", [2])
    pool.publish(c, b"c", b"b", [3])
    pool.publish(a, b"a", None, [1])
    assert [block.block_hash for block in pool.events.snapshot().blocks] == [b"a", b"b", b"c"]


def test_a_log_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one event, not 0"):
        BlockPool(4, 1, event_capacity=0)
