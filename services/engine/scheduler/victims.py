"""Who gives way to a sequence that waits and is more urgent."""

from __future__ import annotations

from collections import Counter
from itertools import takewhile
from typing import Final

from services.engine.kv import BlockPool
from services.engine.scheduler.prefixes import Demand
from services.engine.scheduler.running import RunningSet
from services.engine.scheduler.sequence import Sequence

# A sequence is admitted only if one block stays free for each so many that run: they grow, and without a
# reserve the newcomer would be preempted as soon as its prompt is computed.
_RUNNING_PER_RESERVED_BLOCK: Final = 8


def reserved_blocks(running: int) -> int:
    """Blocks that must stay free beside a newcomer's own if so many run already."""
    return -(-running // _RUNNING_PER_RESERVED_BLOCK)


def choose_victims(head: Sequence, demand: Demand, running: RunningSet, pool: BlockPool) -> list[Sequence]:
    """The fewest running sequences, last in order first, that leave `head` a row and its blocks.

    They must be less urgent by priority itself: having waited long is no reason to take away what others
    compute. And they must come after `head` in order, else a stream of urgent arrivals could preempt an aged
    sequence for ever. Empty if they would not free enough, for then their work would be lost for nothing.
    """
    candidates = [
        sequence
        for sequence in takewhile(lambda sequence: sequence.order > head.order, reversed(running.by_order))
        if sequence.params.priority > head.params.priority
    ]
    free, count = pool.free_count - demand.idle, len(running)
    # Most often it is clear without a look at every block who shares it.
    if demand.allocated > free + sum(len(sequence.block_table) for sequence in candidates):
        return []
    hits, users = set(demand.hits), Counter[int]()
    for number, sequence in enumerate(candidates, 1):
        # A block comes free with its last user, and for nothing else if it is one that `head` hits.
        users.update(sequence.block_table)
        free += sum(
            users[block] == pool.references(block) for block in sequence.block_table if block not in hits
        )
        rows = running.free_rows + number
        if rows >= demand.rows and demand.allocated + reserved_blocks(count - number) <= free:
            return candidates[:number]
    return []
