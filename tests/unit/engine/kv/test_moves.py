"""Defragmentation of a cache that is fetched as one slice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.kv import BlockError, BlockMove, BlockPool


def test_the_highest_blocks_move_into_the_lowest_holes() -> None:
    pool = BlockPool(16, 4)
    table = pool.allocate(10)
    pool.free(table[:4])
    assert pool.plan_moves(2) == [BlockMove(9, 0), BlockMove(8, 1)]
    pool.check([[0, 1, 4, 5, 6, 7]])
    assert pool.highest_used == 7
    assert pool.plan_moves(8) == [BlockMove(7, 2), BlockMove(6, 3)]
    assert pool.plan_moves(8) == []
    assert pool.allocate(2) == [6, 7]


def test_a_few_holes_are_not_worth_a_move() -> None:
    pool = BlockPool(64, 4)
    table = pool.allocate(64)
    pool.free(table[:8])
    assert pool.plan_moves(8) == []
    pool.free([8])
    assert pool.plan_moves(8) == [BlockMove(63, 0), BlockMove(62, 1)]


def test_nothing_in_use_and_no_limit_mean_no_moves() -> None:
    pool = BlockPool(8, 4)
    assert pool.plan_moves(4) == []
    pool.free(pool.allocate(8)[:7])
    assert pool.plan_moves(0) == []


def test_moving_excludes_prefix_caching() -> None:
    with pytest.raises(BlockError, match="only without prefix caching"):
        BlockPool(8, 4, prefix_caching=True).plan_moves(1)


@given(st.lists(st.tuples(st.sampled_from("afm"), st.integers(0, 9)), max_size=60))
def test_moves_keep_every_tables_contents(steps: list[tuple[str, int]]) -> None:
    pool, tables, memory, stamp = BlockPool(24, 4), list[list[int]](), dict[int, int](), 0
    contents: list[list[int]] = []
    for action, n in steps:
        if action == "a" and n <= pool.free_count:
            table = pool.allocate(n)
            memory.update((block, stamp + i) for i, block in enumerate(table))
            tables.append(table)
            contents.append([memory[block] for block in table])
            stamp += n
        elif action == "f" and tables:
            pool.free(tables.pop(n % len(tables)))
            contents.pop(n % len(contents))
        elif action == "m":
            before = pool.highest_used
            moves = pool.plan_moves(n)
            assert len(moves) <= n
            targets = {move.source: move.target for move in moves}
            assert all(move.target < move.source for move in moves)
            assert not set(targets) & set(targets.values())
            assert pool.highest_used <= before - len(moves)
            # All sources are read before a target is written.
            memory.update({target: memory[source] for source, target in targets.items()})
            tables = [[targets.get(block, block) for block in table] for table in tables]
        pool.check(tables)
        assert [[memory[block] for block in table] for table in tables] == contents
