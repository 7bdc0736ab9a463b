"""Who gives way to a sequence that waits and is more urgent."""

from __future__ import annotations

from typing import Final

from services.engine.scheduler.running import RunningSet
from services.engine.scheduler.sequence import Sequence

# A sequence is admitted only if one block stays free for each so many that run: they grow, and without a
# reserve the newcomer would be preempted as soon as its prompt is computed.
_RUNNING_PER_RESERVED_BLOCK: Final = 8


def reserved_blocks(running: int) -> int:
    """Blocks that must stay free beside a newcomer's own if so many run already."""
    return -(-running // _RUNNING_PER_RESERVED_BLOCK)


def choose_victims(head: Sequence, running: RunningSet, needed: int, free: int) -> list[Sequence]:
    """The fewest running sequences, last in order first, that leave a row and `needed` blocks to `head`.

    They must be less urgent by priority itself: having waited long is no reason to take away what others
    compute. And they must come after `head` in order, else a stream of urgent arrivals could preempt an aged
    sequence for ever. Empty if they would not free enough, for then their work would be lost for nothing.
    """
    victims: list[Sequence] = []
    for sequence in reversed(running.by_order):
        if sequence.order < head.order:
            break
        if sequence.params.priority > head.params.priority:
            victims.append(sequence)
            free += len(sequence.block_table)
            if needed + reserved_blocks(len(running) - len(victims)) <= free:
                return victims
    return []
