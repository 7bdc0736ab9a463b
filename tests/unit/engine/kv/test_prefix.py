"""Blocks that are hit by the hash of what they hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from catenary.blockhash import BlockHashes
from services.engine.kv import BlockError, BlockPool, OutOfBlocks, Removed

SIZE = 4


def pool_of(total: int) -> BlockPool:
    return BlockPool(total, SIZE, prefix_caching=True)


def hashes_of(token_ids: list[int], salt: bytes = b"") -> list[bytes]:
    return BlockHashes(SIZE, salt).extend(token_ids)


def compute(pool: BlockPool, token_ids: list[int], salt: bytes = b"") -> list[int]:
    """Allocates a table for the tokens and publishes its full blocks, as a prefill does."""
    table = pool.allocate(pool.blocks_for(len(token_ids)))
    for i, block_hash in enumerate(hashes_of(token_ids, salt)):
        pool.publish(table[i], block_hash)
    return table


@pytest.mark.parametrize(("length", "full"), [(SIZE - 1, 0), (SIZE, 1), (SIZE + 1, 1), (2 * SIZE, 2)])
def test_only_full_blocks_are_hit(length: int, full: int) -> None:
    pool = pool_of(8)
    tokens = list(range(length))
    table = compute(pool, tokens)
    assert pool.lookup(hashes_of([*tokens, 7, 7, 7, 7])) == table[:full]
    pool.free(table)
    assert pool.lookup(hashes_of(tokens)) == table[:full]
    assert (pool.used, pool.free_count, pool.cached_count) == (0, 8, full)


@pytest.mark.advisory("CVE-2025-25183")
def test_the_same_tokens_under_two_salts_share_nothing() -> None:
    pool = pool_of(8)
    tokens = list(range(2 * SIZE))
    first = compute(pool, tokens, b"tenant a")
    assert pool.lookup(hashes_of(tokens, b"tenant b")) == []
    assert pool.lookup(hashes_of(tokens)) == []
    second = compute(pool, tokens, b"tenant b")
    assert pool.lookup(hashes_of(tokens, b"tenant a")) == first
    assert pool.lookup(hashes_of(tokens, b"tenant b")) == second
    assert not set(first) & set(second)


def test_a_hit_ends_where_the_tokens_differ_and_never_begins_in_the_middle() -> None:
    pool = pool_of(8)
    table = compute(pool, [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3])
    assert pool.lookup(hashes_of([1, 1, 1, 1, 2, 2, 2, 9, 3, 3, 3, 3])) == table[:1]
    assert pool.lookup(hashes_of([2, 2, 2, 2])) == []


def test_acquired_blocks_are_shared_until_the_last_reference_is_gone() -> None:
    pool = pool_of(4)
    tokens = list(range(2 * SIZE))
    table = compute(pool, tokens)
    hit = pool.lookup(hashes_of(tokens))
    assert (pool.idle(hit), hit) == (0, table)
    pool.acquire(hit)
    pool.check([table, hit])
    assert pool.used == 2
    pool.free(table)
    assert pool.used == 2
    with pytest.raises(OutOfBlocks, match="3 KV blocks were asked for and 2 are free"):
        pool.allocate(3)
    pool.free(hit)
    assert (pool.used, pool.free_count, pool.idle(hit)) == (0, 4, 2)
    pool.acquire(pool.lookup(hashes_of(tokens)))
    assert (pool.used, pool.free_count, pool.highest_used) == (2, 2, 1)
    pool.check([hit])


def test_blocks_that_hold_nothing_go_before_the_least_recently_used() -> None:
    pool = pool_of(6)
    old, new = compute(pool, [1] * 2 * SIZE), compute(pool, [2] * 2 * SIZE)
    pool.free(old)
    pool.free(new)
    # 4 and 5 were never used. Then the oldest table goes, its end first.
    assert pool.allocate(3) == [4, 5, old[1]]
    assert pool.lookup(hashes_of([1] * 2 * SIZE)) == old[:1]
    assert pool.allocate(2) == [old[0], new[1]]
    assert pool.lookup(hashes_of([2] * 2 * SIZE)) == new[:1]


def test_a_hit_makes_a_block_recent() -> None:
    pool = pool_of(2)
    old, new = compute(pool, [1] * SIZE), compute(pool, [2] * SIZE)
    pool.free(old)
    pool.free(new)
    pool.acquire(pool.lookup(hashes_of([1] * SIZE)))
    pool.free(old)
    assert pool.allocate(1) == new
    assert pool.lookup(hashes_of([1] * SIZE)) == old


def test_a_block_in_use_is_not_evicted() -> None:
    pool = pool_of(2)
    table = compute(pool, [1] * SIZE)
    assert pool.allocate(1) == [1]
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)
    assert pool.lookup(hashes_of([1] * SIZE)) == table


def test_a_second_block_with_a_cached_hash_stays_its_owners_alone() -> None:
    pool = pool_of(4)
    first = compute(pool, [1] * SIZE)
    second = compute(pool, [1] * SIZE)
    assert (pool.cached_count, pool.lookup(hashes_of([1] * SIZE))) == (1, first)
    pool.free(second)
    assert pool.allocate(1) == second
    pool.free(first)
    assert pool.lookup(hashes_of([1] * SIZE)) == first


def test_what_is_published_twice_is_stored_once_and_never_changes() -> None:
    pool = pool_of(4)
    (block,) = compute(pool, [1] * SIZE)
    pool.publish(block, hashes_of([1] * SIZE)[0])
    assert len(pool.events.drain()) == 1
    with pytest.raises(BlockError, match="block 0 is cached with other contents"):
        pool.publish(block, hashes_of([2] * SIZE)[0])


def test_clearing_keeps_blocks_in_use_and_frees_the_others() -> None:
    pool = pool_of(4)
    used, idle = compute(pool, [1] * SIZE), compute(pool, [2] * SIZE)
    pool.free(idle)
    assert pool.clear_cache() == 2
    assert pool.lookup(hashes_of([1] * SIZE)) == pool.lookup(hashes_of([2] * SIZE)) == []
    assert (pool.used, pool.cached_count) == (1, 0)
    pool.check([used])
    assert pool.allocate(3) == [1, 2, 3]
    pool.free(used)
    assert pool.cached_count == 0


def test_what_is_forgotten_is_not_hit_whether_it_is_in_use_or_not() -> None:
    pool = pool_of(4)
    used, idle, other = (compute(pool, [i] * SIZE) for i in (1, 2, 3))
    plain = pool.allocate(1)
    pool.free(idle)
    pool.events.drain()
    pool.forget([*used, *idle, *plain])
    assert [type(event) for event in pool.events.drain()] == [Removed, Removed]
    pool.check([used, other, plain])
    assert [pool.lookup(hashes_of([i] * SIZE)) for i in (1, 2, 3)] == [[], [], other]
    assert pool.allocate(1) == idle
    pool.free(used)
    assert pool.allocate(1) == used


def test_wrong_publishing_and_acquiring_is_named() -> None:
    pool = pool_of(4)
    (block,) = pool.allocate(1)
    with pytest.raises(BlockError, match="block 1 is not in use"):
        pool.publish(1, b"x")
    with pytest.raises(BlockError, match="block 9 does not exist"):
        pool.publish(9, b"x")
    with pytest.raises(BlockError, match="block 0 is not cached"):
        pool.acquire([block])
    pool.publish(block, b"x")
    with pytest.raises(BlockError, match="block 3 is not cached"):
        pool.acquire([block, 3])
    pool.check([[block]])


def test_without_prefix_caching_nothing_is_kept() -> None:
    pool = BlockPool(4, SIZE)
    table = compute(pool, [1] * SIZE)
    assert (pool.cached_count, pool.lookup(hashes_of([1] * SIZE))) == (0, [])
    pool.free(table)
    assert pool.events.drain() == []


# Nothing that a pool can be asked for makes its books differ: these change them.
# ruff: noqa: SLF001


def _free_and_used(pool: BlockPool) -> None:
    pool._free.put(0)


def _free_and_cached(pool: BlockPool) -> None:
    pool._index._idle.clear()
    pool._free.put(1)


def _idle_and_not_cached(pool: BlockPool) -> None:
    pool._index._idle[2] = None


def _two_hashes(pool: BlockPool) -> None:
    pool._index._block_of[b"other"] = 1


def _lost(pool: BlockPool) -> None:
    pool._free.take(1)


def _twice(pool: BlockPool) -> None:
    pool._free.put(3)


@pytest.mark.parametrize(
    ("corrupt", "complaint"),
    [
        (_free_and_used, "in use, and free or idle"),
        (_free_and_cached, "cached and free"),
        (_idle_and_not_cached, "block 2 waits for eviction and is not cached"),
        (_two_hashes, "hashes differ"),
        (_lost, "do not add up"),
        (_twice, "names one twice"),
    ],
)
def test_check_notices_books_that_differ(corrupt: Callable[[BlockPool], None], complaint: str) -> None:
    pool = pool_of(4)
    used = pool.allocate(1)
    pool.free(compute(pool, [1] * SIZE))
    pool.check([used])
    corrupt(pool)
    with pytest.raises(BlockError, match=complaint):
        pool.check([used])
