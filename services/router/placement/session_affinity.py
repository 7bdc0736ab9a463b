"""Session affinity: the sequences of a session go where the session's last one went."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import ClassVar

from services.router.placement.cost import Cost
from services.router.placement.policy import (
    Candidates,
    Choice,
    Memory,
    PlacementOptions,
    PlacementPolicy,
    PlacementRequest,
    overloaded,
    register,
)

_Key = tuple[str, str]


@register("session")
class SessionAffinity(PlacementPolicy):
    """Remembers the engine of each session for `session_ttl_s` after its last sequence.

    A session moves when its engine is gone, full or overloaded; where to, and where a sequence without a
    session goes, says the policy `cost`. At `max_sessions` the one that was used longest ago is forgotten.
    """

    memory: ClassVar[Memory] = Cost.memory

    def __init__(self, rng: random.Random, options: PlacementOptions | None = None) -> None:
        super().__init__(rng, options)
        self._elsewhere = Cost(rng, options)
        # Epoch of the attachment and time of the last use, in the order of use.
        self._sessions: OrderedDict[_Key, tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def pick(self, request: PlacementRequest, candidates: Candidates) -> Choice:
        """See PlacementPolicy."""
        if not request.session_id:
            return self._elsewhere.pick(request, candidates)
        self._expire(candidates.now)
        key = request.model, request.session_id
        choice = self._same(key, candidates) or self._elsewhere.pick(request, candidates)
        self._sessions[key] = candidates.engine(choice.position).epoch, candidates.now
        self._sessions.move_to_end(key)
        if len(self._sessions) > self._options.max_sessions:
            self._sessions.popitem(last=False)
        return choice

    def _same(self, key: _Key, candidates: Candidates) -> Choice | None:
        known = self._sessions.get(key)
        position = None if known is None else candidates.position(known[0])
        if position is None or overloaded(candidates, self._options)[position]:
            return None
        return Choice(position, "session")

    def _expire(self, now: float) -> None:
        oldest = now - self._options.session_ttl_s
        while self._sessions and next(iter(self._sessions.values()))[1] < oldest:
            self._sessions.popitem(last=False)
