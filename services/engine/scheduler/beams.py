"""Groups of beams: they start, branch and are preempted together, and share common blocks."""

from __future__ import annotations

from collections.abc import Iterable

from services.engine.kv import BlockPool
from services.engine.scheduler.queues import RunningSet, WaitingQueue
from services.engine.scheduler.sequence import BeamGroup, Sequence


class Beams:
    """Changes of whole groups, in the queue and in the running set."""

    def __init__(self, pool: BlockPool, waiting: WaitingQueue, running: RunningSet) -> None:
        self._pool = pool
        self._waiting = waiting
        self._running = running

    def wait(self, group: BeamGroup) -> None:
        """Queue a group in the place of its lead."""
        self._waiting.push(group.lead)
        for member in group.members[1:]:
            self._waiting.hold(member)

    def missing(self, group: BeamGroup) -> int:
        """Return the number of blocks that the beams need in addition to the trunk's."""
        others = group.active[1:]
        return sum(
            self._pool.blocks_for(len(one.token_ids)) - self._common(one, group.trunk) for one in others
        )

    def start(self, group: BeamGroup) -> None:
        """Run the other beams of a group whose trunk has just started.

        They share the full blocks that begin alike, computed or not, and rest until all of the trunk is
        planned: their forwards come after the trunk's.
        """
        for member in group.members[1:]:
            self._waiting.leave(member)
        for member in group.members:
            if member is group.trunk:
                continue
            count = self._common(member, group.trunk) if member in group.active else 0
            table = group.trunk.block_table[:count]
            self._pool.share(table)
            fresh = self._pool.blocks_for(len(member.token_ids)) - count
            member.run(table + self._pool.allocate(fresh), count * self._pool.block_size)
            self._running.add_resting(member)

    def wake_others(self, group: BeamGroup, turn: int) -> None:
        """Wake the other beams, once all of the trunk is planned, to compute their own last tokens."""
        for member in group.active[1:]:
            known = len(member.token_ids)
            if member.key in self._running.resting and member.num_computed_tokens < known:
                self._running.wake(member, (turn, member.order[1]))

    def preempt(self, group: BeamGroup) -> list[Sequence]:
        """Free all blocks of a group; it waits again with its tokens. Return the members."""
        group.scored.clear()
        for member in group.members:
            self._running.remove(member)
            self._pool.free(member.preempt())
        self.wait(group)
        return group.members

    def branch(self, group: BeamGroup, choices: Iterable[tuple[Sequence, int]]) -> None:
        """Make these continuations the beams: pairs of a beam so far and its next token, best first.

        A beam's first continuation takes its place. Each further one takes that of a member without any: its
        blocks are those of the beam it comes from, and it copies the last of them before it writes there.
        """
        choices = list(choices)
        parents = {parent.key for parent, _ in choices}
        free = [member for member in group.members if member.key not in parents]
        beams: list[Sequence] = []
        for parent, _ in choices:
            beams.append(free.pop(0) if parent in beams else parent)
        for beam, (parent, _) in zip(beams, choices, strict=True):
            if beam is not parent:
                self._pool.share(parent.block_table)
                self._pool.free(beam.follow(parent, self._pool.block_size))
        for member in free:
            self._pool.free(member.rest())
        for beam, (_, token) in zip(beams, choices, strict=True):
            beam.token_ids.append(token)
            self._running.wake(beam, beam.turn)
        group.active = beams
        group.scored.clear()

    def _common(self, member: Sequence, trunk: Sequence) -> int:
        """Return the number of the trunk's full blocks that begin another beam too, before its last token."""
        mine, other = member.token_ids, trunk.token_ids
        limit = min(len(mine), len(other)) - 1
        same = next((index for index in range(limit) if mine[index] != other[index]), limit)
        return same // self._pool.block_size
