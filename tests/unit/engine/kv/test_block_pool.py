from __future__ import annotations

import pytest

from services.engine.kv import BlockError, BlockPool, OutOfBlocks


def test_lowest_ids_go_out_first_whatever_the_order_of_frees() -> None:
    pool = BlockPool(6, 32)
    assert pool.allocate(4) == [0, 1, 2, 3]
    pool.free([3, 0])
    assert pool.allocate(3) == [0, 3, 4]
    assert (pool.used, pool.free_count) == (5, 1)


def test_a_request_beyond_the_pool_allocates_nothing() -> None:
    pool = BlockPool(2, 32)
    with pytest.raises(OutOfBlocks, match="3 KV blocks were asked for and 2 are free"):
        pool.allocate(3)
    assert pool.used == 0
    assert pool.allocate(0) == []
    with pytest.raises(ValueError):
        pool.allocate(-1)


@pytest.mark.parametrize("ids", [[1, 1], [0], [1, 0], [7], [-1]])
def test_a_wrong_free_is_named_and_frees_nothing(ids: list[int]) -> None:
    pool = BlockPool(3, 32)
    pool.allocate(2)
    pool.free([0])
    with pytest.raises(BlockError, match="KV block"):
        pool.free(ids)
    assert pool.used == 1


@pytest.mark.parametrize(("total", "block_size"), [(0, 32), (4, 0), (-1, 32)])
def test_empty_pools_are_refused(total: int, block_size: int) -> None:
    with pytest.raises(ValueError):
        BlockPool(total, block_size)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (32, 1), (33, 2), (64, 2)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert BlockPool(4, 32).blocks_for(tokens) == blocks


def test_check_finds_shared_leaked_and_unallocated_blocks() -> None:
    pool = BlockPool(4, 32)
    pool.allocate(3)
    pool.check([[0, 2], [1]])
    with pytest.raises(BlockError, match="block 0 has 1 references and 2 users"):
        pool.check([[0, 2], [1, 0]])
    with pytest.raises(BlockError, match="block 1 has 1 references and 0 users"):
        pool.check([[0, 2]])
    with pytest.raises(BlockError, match="block 3 has 0 references and 1 users"):
        pool.check([[0, 2, 3], [1]])
    with pytest.raises(BlockError, match="names a KV block twice"):
        pool.check([[0, 2, 2], [1]])
    with pytest.raises(BlockError, match="block 9 does not exist"):
        pool.check([[0, 2], [1], [9]])


def test_highest_used_follows_frees() -> None:
    pool = BlockPool(6, 32)
    assert pool.highest_used == -1
    pool.allocate(5)
    pool.free([4, 1])
    assert pool.highest_used == 3
    pool.free([3, 2])
    assert pool.highest_used == 0
    pool.allocate(2)
    assert pool.highest_used == 2
    pool.free([0, 1, 2])
    assert pool.highest_used == -1
