"""Beam searches under random events: any beams may go on, in any number, until one decision ends them."""

from __future__ import annotations

import random
from dataclasses import dataclass

from services.engine.domain import FinishReason
from services.engine.scheduler import (
    BeamGroup,
    QueueFull,
    Sequence,
    SequenceRefused,
    SequenceStatus,
)
from tests.support.plan_checks import PlanChecks
from tests.support.simulated_engine import VOCABULARY, Reference, first_state, next_state, params

_MOST_BEAMS = 4


@dataclass(eq=False)
class BeamReference(Reference):
    """What a beam is by the decisions so far."""

    def __post_init__(self) -> None:
        self.follow(self.sequence.token_ids)

    def follow(self, token_ids: list[int]) -> None:
        """The beam has these tokens; all but the last are computed, if it runs."""
        self.states, state = [], first_state(self.sequence.cache_salt)
        for token in token_ids:
            state = next_state(state, token)
            self.states.append(state)
        self.length = len(token_ids)
        self.computed = max(0, self.length - 1) if self.sequence.status is SequenceStatus.RUNNING else 0


class BeamEvents(PlanChecks):
    """Adds searches and makes their decisions."""

    rng: random.Random
    bases: list[list[int]]
    next_key: int

    def add_beams(self) -> None:
        """A new search."""
        config, rng = self.setup.config, self.rng
        width = rng.randint(1, _MOST_BEAMS)
        length = rng.choice([rng.randint(1, 8), rng.randint(1, config.max_model_len)])
        prompt = [*rng.choice(self.bases)[:length]]
        wanted = params(max_tokens=rng.randint(1, 20), priority=rng.choice(self.setup.priorities))
        self.next_key += 1
        lead = Sequence(self.next_key, prompt, length, wanted)
        others = [Sequence(-_MOST_BEAMS * self.next_key - n, [], length, wanted) for n in range(width - 1)]
        members = [lead, *others]
        longest = min(config.max_model_len, length + wanted.max_tokens)
        blocks = self.pool.blocks_for(longest - 1)
        needed = blocks + (width - 1) * (blocks - length // self.pool.block_size)
        possible = width <= config.max_num_seqs and not config.contiguous and length < config.max_model_len
        fits = possible and needed <= self.pool.total
        try:
            self.scheduler.add_beams(members)
        except QueueFull:
            assert len(self.live) + width > config.max_num_seqs + config.max_waiting
        except SequenceRefused:
            assert not fits
        else:
            assert fits
            for member in members:
                self.live[member.key] = BeamReference(member, config.max_model_len)
            self.counts["searches"] += 1

    def decide(self, group: BeamGroup) -> None:
        """Ends a search whose beams are all scored, or lets some continuations of them go on."""
        lead, active = group.lead, list(group.active)
        assert all(not beam.num_pending for beam in active)
        if len(active[0].token_ids) + 1 >= lead.longest or self.rng.random() < 0.06:
            assert self.scheduler.end(lead.key, FinishReason.STOP) is not None
            for member in group.members:
                self.ended(self.live[member.key], SequenceStatus.RUNNING)
            return
        count = self.rng.randint(1, len(group.members))
        choices = [(self.rng.choice(active), self.rng.randrange(VOCABULARY)) for _ in range(count)]
        expected = [[*parent.token_ids, token] for parent, token in choices]
        self.scheduler.branch(group, choices)
        assert [beam.token_ids for beam in group.active] == expected
        for member in group.members:
            self.live[member.key].follow(member.token_ids)  # type: ignore[attr-defined]
            assert member.num_computed_tokens == self.live[member.key].computed
        self.counts["branches"] += 1
        self.counts["beams that share their last block"] += sum(beam.shares_last for beam in group.active)

    def ended(self, reference: Reference, status: SequenceStatus) -> None:
        """Notes that a sequence ended, which had this status."""
        raise NotImplementedError
