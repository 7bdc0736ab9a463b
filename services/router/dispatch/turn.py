"""A sequence that needs more room than any engine has now must neither hold the others up nor starve."""

from __future__ import annotations

from itertools import islice

from catenary.v1 import engine_pb2
from services.router.admission import ModelQueue, Ticket
from services.router.dispatch.engine_links import EngineLinks
from services.router.dispatch.sequence import LiveSequence
from services.router.fleet import Engine, Fleet

_ANY = engine_pb2.ENGINE_ROLE_UNSPECIFIED
# Sequences that are let past another one at a time, and those that are looked at for them.
_PASSED = 8
_LOOKED_AT = 256


class KeptForTurns:
    """Keeps one engine of each model for the sequence whose turn it is there: it is given nothing else and
    empties, and the others go on on the rest of the engines."""

    def __init__(self, fleet: Fleet, links: EngineLinks) -> None:
        self._fleet = fleet
        self._links = links
        self._kept: dict[str, tuple[LiveSequence, Engine]] = {}

    def room_beside(self, model: str, sequences: int = 1, tokens: int = 1) -> bool:
        """Whether an engine that is reserved for no sequence has room for so many sequences
        with so many tokens of KV."""
        board = self._fleet.board(model)
        return bool((board.open_to(_ANY) & board.free_for(None) & board.roomy(sequences, tokens)).any())

    def turn_of(self, sequence: LiveSequence) -> None:
        """It is this one's turn, of those that wait for its model: nothing is kept for another one."""
        kept = self._kept.get(sequence.request.model)
        if kept is not None and kept[0] is not sequence:
            self.over(kept[0])

    def keep(self, sequence: LiveSequence) -> bool:
        """Keep the engine for it that has most of its room left, of those that can hold it and compute all of
        it. False: there is none, and sequences let past it could starve it."""
        request = sequence.request
        kept = self._kept.get(request.model)
        if kept is not None:
            if kept[1].available and self._fleet.find(kept[1].instance_id) is kept[1]:
                return True
            self.over(sequence)
        free = [
            engine
            for engine in self._fleet.candidates(request.model)
            if engine.kept_for is None and engine.kv_tokens >= request.kv_tokens
        ]
        if free:
            engine = min(free, key=_taken)
            self._links.keep(engine, request)
            self._kept[request.model] = sequence, engine
        return bool(free)

    def over(self, sequence: LiveSequence) -> None:
        """It waits no longer, or its turn is over. Idempotent."""
        kept = self._kept.get(sequence.request.model)
        if kept is not None and kept[0] is sequence:
            del self._kept[sequence.request.model]
            self._links.give_back(kept[1])


def _taken(engine: Engine) -> float:
    """Share of its slots or of its KV that is taken, whichever is larger."""
    return max(
        engine.sequences / max(1, engine.capacity.max_running), engine.kv.held / max(1, engine.kv_tokens)
    )


def smaller(queue: ModelQueue[LiveSequence], head: Ticket[LiveSequence]) -> list[Ticket[LiveSequence]]:
    """Some of those that wait behind `head` and need less room: in slots or in KV."""
    found = (
        ticket
        for ticket in islice(queue.lanes.behind(head, _LOOKED_AT), _LOOKED_AT)
        if (ticket.sequences < head.sequences or _kv(ticket) < _kv(head))
        and queue.places.admits(ticket.lane, ticket.sequences)
    )
    return list(islice(found, _PASSED))


def _kv(ticket: Ticket[LiveSequence]) -> int:
    return ticket.item.request.kv_tokens
