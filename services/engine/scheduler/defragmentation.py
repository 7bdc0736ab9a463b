"""Keeps the blocks in use near the start of the cache, where decode fetches one slice of it."""

from __future__ import annotations

from services.engine.kv import BlockMove, BlockPool
from services.engine.scheduler.running import RunningSet
from services.engine.scheduler.sequence import Sequence


def move_blocks(
    running: RunningSet, pool: BlockPool, limit: int
) -> tuple[tuple[BlockMove, ...], tuple[Sequence, ...]]:
    """Moves up to `limit` blocks if that pays, and rewrites the tables that name them. Returns whose too.

    It is right to rewrite them while a step is in flight. That step was launched with the old ids, and the
    moves are executed after it and before the forwards of the step that is planned now: they carry along what
    it writes, and everything planned from here on comes after them. So does whoever gets a source block.
    """
    moves = pool.plan_moves(limit)
    if not moves:
        return (), ()
    targets = {move.source: move.target for move in moves}
    lowest = min(targets)
    moved: list[Sequence] = []
    for sequence in running.by_order:
        if sequence.highest_block >= lowest and not targets.keys().isdisjoint(sequence.block_table):
            sequence.set_blocks([targets.get(block, block) for block in sequence.block_table])
            moved.append(sequence)
    return tuple(moves), tuple(moved)
