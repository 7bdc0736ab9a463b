"""Sequences before an engine has them: placed at once, or waiting until there is room.

Engines are reserved for two kinds: for a sequence that is to be computed alone, since engines died in its
first forward, and for one that needs more room than any engine has now, lest the others starve it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator
from itertools import islice

from catenary.v1 import common_pb2, engine_pb2, router_pb2
from services.router.admission import (
    Admission,
    LaneView,
    LoadGuard,
    ModelQueue,
    QueueOptions,
    Refused,
    RefusedFor,
    Shedding,
    Ticket,
    WaitingRoom,
    lane_of,
    sequences_of,
    too_long,
    validate_task,
)
from services.router.dispatch.engine_links import EngineLinks
from services.router.dispatch.sequence import LiveSequence, trace_placed
from services.router.fleet import Engine, Fleet
from services.router.placement import AnyPlacer


class LoneSequences:
    """Keeps engines for them: one that is kept is given nothing else, empties, and is theirs until their
    first token. They take turns: the first of a model that waits has one engine kept, so that the others go
    on."""

    def __init__(self, fleet: Fleet, links: EngineLinks) -> None:
        self._fleet = fleet
        self._links = links
        # Of each model, in the order in which they came.
        self._waiting: defaultdict[str, OrderedDict[LiveSequence, None]] = defaultdict(OrderedDict)
        self._kept: dict[LiveSequence, Engine] = {}

    def waits(self, model: str) -> bool:
        """Whether one of this model waits."""
        return model in self._waiting

    def firsts(self) -> Iterator[LiveSequence]:
        """Whose turn it is, of each model; the next of a model if that one no longer waits by then."""
        for model in list(self._waiting):
            last = None
            while (row := self._waiting.get(model)) and (first := next(iter(row))) is not last:
                yield first
                last = first

    def wait(self, sequence: LiveSequence) -> None:
        """No engine of its model is empty: keep one for it, if it is its turn."""
        request = sequence.request
        row = self._waiting[request.model]
        row[sequence] = None
        kept = self._kept.get(sequence)
        if kept is not None and kept.available and any(engine is kept for engine in self._fleet):
            return
        self._give_back(sequence)
        if next(iter(row)) is not sequence:
            return
        candidates = self._fleet.candidates(request.model)
        free = [engine for engine in candidates if engine.kept_for is None]
        if free:
            self._keep(sequence, min(free, key=lambda engine: engine.sequences))

    def placed(self, sequence: LiveSequence, engine: Engine) -> None:
        """It has an engine, which gets nothing else."""
        if self._kept.get(sequence) is engine:
            # Not given back and kept again: it would be another router's turn in between.
            self._waits_no_longer(sequence)
        else:
            self.over(sequence)
            self._keep(sequence, engine)

    def over(self, sequence: LiveSequence) -> None:
        """It may have company from here on, or is gone. Idempotent."""
        self._waits_no_longer(sequence)
        self._give_back(sequence)

    def _waits_no_longer(self, sequence: LiveSequence) -> None:
        model = sequence.request.model
        if (row := self._waiting.get(model)) is not None:
            row.pop(sequence, None)
            if not row:
                del self._waiting[model]

    def _keep(self, sequence: LiveSequence, engine: Engine) -> None:
        self._kept[sequence] = engine
        self._links.keep(engine, sequence.request)

    def _give_back(self, sequence: LiveSequence) -> None:
        engine = self._kept.pop(sequence, None)
        if engine is not None:
            self._links.give_back(engine)


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


CallSoon = Callable[[Callable[[], None]], object]
_NOBODY = common_pb2.ERROR_CODE_UNAVAILABLE
_WAITS = frozenset({common_pb2.ERROR_CODE_OVERLOADED, _NOBODY})


class Intake:
    """Gives sequences to engines, and lets those wait in lanes whom no engine has room for. Never awaits."""

    def __init__(
        self,
        placer: AnyPlacer,
        options: QueueOptions,
        links: EngineLinks,
        *,
        refuse: Callable[[LiveSequence, common_pb2.Error], None],
        waited: Callable[[int, float], None],
        clock: Callable[[], float],
        call_soon: CallSoon | None = None,
    ) -> None:
        """`refuse` tells one that waited in vain; `waited` gets the lane and the seconds of each wait that
        ended well."""
        self._placer = placer
        self._fleet = placer.fleet
        self._links = links
        self._refuse = refuse
        self._waited = waited
        self._clock = clock
        self._call_soon = call_soon
        self._lone = LoneSequences(placer.fleet, links)
        self._turns = KeptForTurns(placer.fleet, links)
        self._pump_due = False
        self._stale = True
        self._closed: common_pb2.Error | None = None
        self._shedding = Shedding()
        self.resumed = 0
        """Sequences that were admitted before, here or elsewhere."""
        self.room: WaitingRoom[LiveSequence] = WaitingRoom(
            options, lambda ticket: placer.uncached_tokens(ticket.item.request)
        )

    def let_in(self, admission: Admission, spec: common_pb2.SequenceSpec, *, resumed: bool) -> LoadGuard:
        """Count a sequence in. Raises Refused, which is counted by class."""
        try:
            return admission.admit(len(spec.token_ids), sequences_of(spec), resumed=resumed)
        except Refused:
            reason = RefusedFor.DRAINING if admission.draining else RefusedFor.ROUTER_FULL
            self.room.refused(lane_of(spec), reason)
            raise

    def enter(self, sequence: LiveSequence) -> None:
        """Place a new sequence at once, or let it wait.

        Raises:
            Refused: it can neither be placed nor wait.
        """
        if self._closed is not None:
            raise Refused.of(self._closed)
        now, room, spec = self._clock(), self.room, sequence.spec
        self.resumed += sequence.resumed
        self._look(now)
        ticket = sequence.ticket = room.ticket(
            sequence, spec, now, first=sequence.resumed, apart=sequence.alone
        )
        if not self._fleet.knows(spec.model):
            # No queue for a name that a client may invent.
            self._place(sequence)
        queue = room.queue_of(spec.model)
        if len(spec.token_ids) > queue.longest > 0:
            # Before placement, which would name and remember all of its blocks.
            raise too_long(len(spec.token_ids), queue.longest)
        sequence.guard.classify(queue.places.load, ticket.home)
        error: common_pb2.Error | None = None
        if self._goes_first(queue, ticket):
            error = self._try(sequence)
            if error is None:
                room.take(ticket, now)
                return
            if error.code not in _WAITS:
                raise Refused.of(error)
        room.check(ticket, sequence.request.kv_tokens, now, served=error is None or error.code != _NOBODY)
        room.add(ticket, now)
        if sequence.alone:
            self._lone.wait(sequence)
        self.pump_soon()

    def place_again(self, sequence: LiveSequence, *, excluding: Collection[Engine]) -> bool:
        """Give a sequence that an engine refused to another one. False if none can take it now."""
        self._lone.over(sequence)
        sequence.request.queued_ms = 0
        return self._try(sequence, excluding=excluding) is None

    def wait_again(self, sequence: LiveSequence) -> bool:
        """Let a sequence that engines have refused wait in front of its lane. False: it has waited enough, or
        nothing may wait."""
        ticket, now = sequence.ticket, self._clock()
        if self._closed is not None or ticket is None or ticket.deadline <= now:
            return False
        sequence.guard.unplace()
        self._lone.over(sequence)
        ticket.first = True
        self.room.add(ticket, now, foremost=not ticket.apart)
        if sequence.alone:
            self._lone.wait(sequence)
        return True

    def wait_between(self, sequence: LiveSequence) -> bool:
        """As `wait_again`, for one that an engine has computed in part: its wait begins anew."""
        if (ticket := sequence.ticket) is not None:
            now = self._clock()
            ticket.deadline, ticket.since = now + ticket.deadline - ticket.since, now
        return self.wait_again(sequence)

    def forget(self, sequence: LiveSequence) -> None:
        """It is over: it waits no longer and keeps no engine for itself. Idempotent."""
        self._lone.over(sequence)
        self._turns.over(sequence)
        if sequence.ticket is not None:
            self.room.remove(sequence.ticket)
        self.pump_soon()

    def accompany(self, sequence: LiveSequence) -> None:
        """A lone sequence has its first token: its engine may have others."""
        self._lone.over(sequence)
        self.pump_soon()

    def fleet_changed(self) -> None:
        """Other engines than before may be given sequences. Looked at once for all changes of this tick."""
        self._stale = True
        self._pump_at_end()

    @property
    def closed(self) -> common_pb2.Error | None:
        """The refusal of sequences that would have to wait, once nothing may."""
        return self._closed

    def close(self, error: common_pb2.Error) -> None:
        """Refuse what waits, and let nothing wait from here on: the router drains, and another one may have
        room."""
        self._closed = error
        for ticket in self.room.tickets():
            self._refuse(ticket.item, error)

    def shed_state(self) -> router_pb2.ShedState | None:
        """The classes without room to wait; None: no change since the last call."""
        return self._shedding.update(self.room, self._clock())

    def lanes(self) -> list[LaneView]:
        """Waiting sequences, by class."""
        return self.room.views(self._clock())

    def pump_soon(self) -> None:
        """Look for room at the end of this tick of the loop, once for all that freed some."""
        if len(self.room):
            self._pump_at_end()

    def tick(self) -> None:
        """Periodic work: look at the fleet, promote, refuse what waited too long, place."""
        now = self._clock()
        self._stale = True
        self._look(now)
        self.room.promote(now)
        for ticket in self.room.due(now):
            self._refuse(ticket.item, self.room.turn_away(ticket, now))
        self.pump()

    def pump(self) -> None:
        """Place what there is room for."""
        self._pump_due = False
        now = self._clock()
        self._look(now)
        for sequence in self._lone.firsts():
            self._admit(sequence, now)
        for queue in self.room:
            head = _next(queue)
            while head is not None and self._admit(head.item, now):
                head = _next(queue)
            if head is not None:
                self._let_past(queue, head, now)

    def _pump_at_end(self) -> None:
        if not self._pump_due:
            self._pump_due = True
            (self._call_soon or asyncio.get_running_loop().call_soon)(self.pump)

    def _let_past(self, queue: ModelQueue[LiveSequence], head: Ticket[LiveSequence], now: float) -> None:
        """No engine has room for whose turn it is: one is kept for it, and those that need less go to others.
        Not while another sequence waits for an engine of its own."""
        self._turns.turn_of(head.item)
        if self._lone.waits(queue.model) or not self._turns.room_beside(queue.model):
            return
        if not self._turns.keep(head.item):
            return
        for ticket in smaller(queue, head):
            tokens = ticket.item.request.kv_tokens
            if self._turns.room_beside(queue.model, ticket.sequences, tokens) and self._admit(
                ticket.item, now
            ):
                # There may be more of them; others have their turn of the loop first.
                self._pump_at_end()

    def _admit(self, sequence: LiveSequence, now: float) -> bool:
        """Place one that waits, or refuse it for good. False: it goes on waiting."""
        ticket = sequence.ticket
        if ticket is None:
            return False
        sequence.request.queued_ms = round((now - ticket.since) * 1000)
        error = self._try(sequence)
        if error is None:
            self._turns.over(sequence)
            self.room.take(ticket, now)
            self._waited(ticket.home, now - ticket.since)
            return True
        if error.code in _WAITS:
            if sequence.alone:
                self._lone.wait(sequence)
            return False
        self.room.remove(ticket)
        self._refuse(sequence, error)
        return True

    def _goes_first(self, queue: ModelQueue[LiveSequence], ticket: Ticket[LiveSequence]) -> bool:
        """Whether no waiting sequence comes before a newcomer, and it takes no place that is kept from it."""
        if ticket.apart:
            return not self._lone.waits(ticket.model)
        return not queue.lanes.blocked(ticket.home, first=ticket.first) and queue.places.admits(
            ticket.home, ticket.sequences
        )

    def _try(self, sequence: LiveSequence, *, excluding: Collection[Engine] = ()) -> common_pb2.Error | None:
        """Give it to an engine. Returns why that cannot be, None if an engine has it."""
        try:
            self._place(sequence, excluding=excluding)
        except Refused as refusal:
            return refusal.error
        return None

    def _place(self, sequence: LiveSequence, *, excluding: Collection[Engine] = ()) -> None:
        request, leader, guard = sequence.request, sequence.same_prompt_as, sequence.guard
        request.beside = None if leader is None else leader.engine
        placed = self._placer.place(request, excluding=excluding)
        engine = placed.engine
        validate_task(sequence.spec, engine.model)
        guard.unplace()
        if placed.engine is request.beside:
            guard.kv_tokens = min(request.kv_tokens, engine.capacity.block_size)
        else:
            guard.kv_tokens = max(0, request.kv_tokens - placed.receipt.matched_tokens)
        sequence.traceparent = trace_placed(sequence.spec, placed.receipt)
        self._links.send(sequence, engine)
        if sequence.alone:
            self._lone.placed(sequence, engine)

    def _look(self, now: float) -> None:
        """Take over what the fleet is now, if it may have changed."""
        if self._stale:
            self._stale = False
            self.room.refresh(self._fleet, now, self._fleet.knows)


def _next(queue: ModelQueue[LiveSequence]) -> Ticket[LiveSequence] | None:
    """Whose turn it is, if it takes no place that is kept from it."""
    for head in queue.lanes.heads():
        if queue.places.admits(head.lane, head.sequences):
            return head
    return None
