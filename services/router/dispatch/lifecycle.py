"""The steps of a sequence between its admission and its end: queued, placed, retried, ended or refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from catenary.v1 import common_pb2, engine_pb2, router_pb2
from services.router.admission import (
    Admission,
    AdmissionQueues,
    LaneView,
    LoadGuard,
    ModelQueue,
    QueueOptions,
    Refused,
    RefusedFor,
    Shedding,
    lane_of,
    not_served,
    sequences_of,
    too_long,
    validate_task,
)
from services.router.dispatch.handover import Handovers
from services.router.dispatch.health import EngineHealth
from services.router.dispatch.reservations import EngineLinks, Entry, QuarantineQueue, Reservations, smaller
from services.router.dispatch.sequence import LiveSequence, Target, trace_placed, trace_refused
from services.router.dispatch.states import ON_ENGINE, SequenceEvent
from services.router.fleet import Engine
from services.router.metrics import RouterMetrics
from services.router.placement import AnyPlacer, SplitPart

CallSoon = Callable[[Callable[[], None]], object]

# Engines that are asked for a sequence before it waits again.
MAX_PLACEMENTS = 2
# An engine that refuses a sequence with one of these may take it later.
FOR_NOW = frozenset(
    {common_pb2.ERROR_CODE_OVERLOADED, common_pb2.ERROR_CODE_DRAINING, common_pb2.ERROR_CODE_UNAVAILABLE}
)
_UNSERVED = common_pb2.ERROR_CODE_UNAVAILABLE
# A sequence that placement refuses with these may wait for an engine.
_WAITS = frozenset({common_pb2.ERROR_CODE_OVERLOADED, _UNSERVED})


class Lifecycle:
    """Owns every step that changes a sequence. Never awaits.

    Each step applies an event of the table in `states`, and keeps the queues, reservations and handovers in
    line with it. Sequences that wait are placed at the end of the tick of the loop in which there may be room
    for them (`pump_soon`), and in each `tick`.
    """

    def __init__(
        self,
        placer: AnyPlacer,
        options: QueueOptions,
        metrics: RouterMetrics,
        health: EngineHealth,
        *,
        clock: Callable[[], float],
        call_soon: CallSoon | None = None,
    ) -> None:
        self._placer = placer
        self._fleet = placer.fleet
        self._metrics = metrics
        self._health = health
        self._clock = clock
        self._call_soon = call_soon
        self.links = EngineLinks()
        self.handovers = Handovers(metrics.handovers, placer.fleet)
        self.queues: AdmissionQueues[LiveSequence] = AdmissionQueues(
            options, lambda entry: placer.uncached_tokens(entry.item.request)
        )
        self._quarantine = QuarantineQueue(placer.fleet, self.links)
        self._reservations = Reservations(placer.fleet, self.links)
        self._shedding = Shedding()
        # Sequences whose engine has not confirmed an abort, by engine handle.
        self._aborting: dict[int, LiveSequence] = {}
        self._last_handle = 0
        self._pump_due = False
        self._stale = True
        self._closed: common_pb2.Error | None = None
        self.resumed = 0
        """Sequences that were admitted before, here or by another router."""

    # Submit

    def admit(self, admission: Admission, spec: common_pb2.SequenceSpec, *, resumed: bool) -> LoadGuard:
        """Count a sequence in. Raises Refused, which is counted by class."""
        try:
            return admission.admit(len(spec.token_ids), sequences_of(spec), resumed=resumed)
        except Refused:
            reason = RefusedFor.DRAINING if admission.draining else RefusedFor.ROUTER_FULL
            self.queues.count_refusal(lane_of(spec), reason)
            raise

    def place_or_enqueue(self, sequence: LiveSequence) -> None:
        """Place a new sequence at once, or queue it.

        Raises:
            Refused: it can neither be placed nor wait.
        """
        if self._closed is not None:
            raise Refused.of(self._closed)
        now, queues, spec = self._clock(), self.queues, sequence.spec
        self.resumed += sequence.resumed
        self._look(now)
        entry = sequence.entry = queues.entry(
            sequence, spec, now, first=sequence.resumed, apart=sequence.quarantined
        )
        if not self._fleet.knows(spec.model):
            # No queue for a name that a client may invent.
            self._place(sequence)
        queue = queues.queue_of(spec.model)
        if len(spec.token_ids) > queue.longest > 0:
            # Before placement, which would name and remember all of its blocks.
            raise too_long(len(spec.token_ids), queue.longest)
        sequence.guard.classify(queue.quota.load, entry.home)
        error: common_pb2.Error | None = None
        if self._goes_first(queue, entry):
            error = self._try(sequence)
            if error is None:
                queues.take(entry, now)
                return
            if error.code not in _WAITS:
                raise Refused.of(error)
        queues.check(entry, sequence.request.kv_tokens, now, served=error is None or error.code != _UNSERVED)
        self._enqueue(sequence, entry, now)
        self.pump_soon()

    # Retry

    def retry_elsewhere(self, sequence: LiveSequence, code: common_pb2.ErrorCode.ValueType) -> bool:
        """Place a sequence that its engine refused on another engine, or queue it again.

        Returns:
            False if neither is possible: nothing has changed.
        """
        engine = sequence.link.engine
        sequence.refused_by.append(engine)
        for_now = code in FOR_NOW
        # Until its next report it is not asked again.
        engine.full = engine.full or for_now
        other = len(sequence.refused_by) < MAX_PLACEMENTS
        if not (other and self._try_again(sequence, excluding=sequence.refused_by)):
            if not (for_now and self._enqueue_again(sequence)):
                return False
            sequence.refused_by.clear()
        self._metrics.placed_again.inc()
        return True

    def retry(self, sequence: LiveSequence) -> None:
        """Place a sequence for what follows its prompt, or for all of it; else queue it, or refuse it."""
        if self._try_again(sequence, excluding=()):
            return
        if (entry := sequence.entry) is not None:
            # An engine has computed a part of it: its wait begins anew.
            now = self._clock()
            entry.deadline, entry.since = now + entry.deadline - entry.since, now
        if not self._enqueue_again(sequence):
            self.refuse(sequence, self._closed or not_served().error)

    def accompany(self, sequence: LiveSequence) -> None:
        """End the quarantine of a sequence that has its first token."""
        self._quarantine.release(sequence)
        self.pump_soon()

    def _try_again(self, sequence: LiveSequence, *, excluding: Collection[Engine]) -> bool:
        self._quarantine.release(sequence)
        sequence.request.queued_ms = 0
        return self._try(sequence, excluding=excluding) is None

    def _enqueue_again(self, sequence: LiveSequence) -> bool:
        """Queue a sequence in front of its lane. False: it has waited long enough, or nothing may wait."""
        entry, now = sequence.entry, self._clock()
        if self._closed is not None or entry is None or entry.deadline <= now:
            return False
        self._quarantine.release(sequence)
        entry.first = True
        self._enqueue(sequence, entry, now, foremost=not entry.apart)
        return True

    # Complete

    def abort(self, sequence: LiveSequence) -> None:
        """End a sequence that no engine has heard of; else have its engine abort it."""
        if sequence.state in ON_ENGINE:
            sequence.apply(SequenceEvent.ABORT)
            sequence.aborted_at = self._clock()
            if not sequence.link.abort(sequence.engine_handle):
                self._aborting[sequence.engine_handle] = sequence
                return
        self.end(sequence, sequence.ending(common_pb2.FINISH_REASON_ABORT))

    def end_aborts(self, before: float) -> None:
        """End the sequences whose abort was sent before that time and is not confirmed."""
        for sequence in [each for each in self._aborting.values() if each.aborted_at < before]:
            self.end(sequence, sequence.ending(common_pb2.FINISH_REASON_ABORT))

    def end(self, sequence: LiveSequence, end: common_pb2.SequenceEnd) -> None:
        """End a sequence, and tell its sink `end`, after putting that right."""
        self.handovers.ended(sequence, end)
        self.release(sequence, SequenceEvent.END)
        self._metrics.ended(end.reason, sequence.ends_as)
        sequence.sink.end(sequence.handle, end)
        aborted = end.reason == common_pb2.FINISH_REASON_ABORT
        self.answer_abort(
            sequence,
            common_pb2.ABORT_OUTCOME_ABORTED if aborted else common_pb2.ABORT_OUTCOME_ALREADY_FINISHED,
        )

    def refuse(self, sequence: LiveSequence, error: common_pb2.Error) -> None:
        """Refuse a sequence that was admitted, and tell its sink."""
        self._metrics.refused(error.code)
        waited_s = 0.0 if sequence.entry is None else self._clock() - sequence.entry.since
        trace_refused(sequence.spec, error, waited_s)
        self.release(sequence, SequenceEvent.REFUSE)
        sequence.sink.refuse(sequence.handle, error)

    def answer_abort(self, sequence: LiveSequence, outcome: common_pb2.AbortOutcome.ValueType) -> None:
        """Answer the callers that asked for an abort and have no answer yet."""
        if sequence.abort_wanted_answer:
            sequence.abort_wanted_answer = False
            sequence.sink.abort_result(sequence.handle, outcome)

    def release(self, sequence: LiveSequence, event: SequenceEvent) -> None:
        """Apply END or REFUSE: release all that a sequence holds, without a word to its sink."""
        self.handovers.forget(sequence)
        if sequence.state in ON_ENGINE:
            self._aborting.pop(sequence.engine_handle, None)
        sequence.apply(event)
        self._quarantine.release(sequence)
        self._reservations.release(sequence)
        if sequence.entry is not None:
            self.queues.remove(sequence.entry)
        self.pump_soon()

    # Queue

    def fleet_changed(self) -> None:
        """Look at the engines at the end of this tick: others than before may be given sequences."""
        self._stale = True
        self._pump_at_end()

    @property
    def closed(self) -> common_pb2.Error | None:
        """The refusal of sequences that would have to wait, once none may."""
        return self._closed

    def close(self, error: common_pb2.Error) -> None:
        """Refuse with `error` what waits, and what would have to wait from here on: the router drains."""
        self._closed = error
        for entry in self.queues.entries():
            self.refuse(entry.item, error)

    def shed_state(self) -> router_pb2.ShedState | None:
        """Return the classes and tenants without room to wait; None: as in the last call."""
        return self._shedding.update(self.queues, self._clock())

    def lanes(self) -> list[LaneView]:
        """Return what waits, by class."""
        return self.queues.views(self._clock())

    def pump_soon(self) -> None:
        """Look for room at the end of this tick of the loop, once for all that freed some."""
        if len(self.queues) or self.handovers.due:
            self._pump_at_end()

    def tick(self) -> None:
        """Do the periodic work: look at the fleet, promote, refuse what waited too long, place."""
        now = self._clock()
        self._stale = True
        self._look(now)
        self.queues.promote(now)
        for entry in self.queues.due(now):
            self.refuse(entry.item, self.queues.refuse_expired(entry, now))
        self.pump()

    def pump(self) -> None:
        """Place the sequences that there is room for."""
        self._pump_due = False
        now = self._clock()
        self._look(now)
        while self.handovers.due:
            self._place_follower(self.handovers.due.pop(0))
        for sequence in self._quarantine.firsts():
            self._dequeue(sequence, now)
        for queue in self.queues:
            head = _next(queue)
            while head is not None and self._dequeue(head.item, now):
                head = _next(queue)
            if head is not None:
                self._overtake(queue, head, now)

    def _pump_at_end(self) -> None:
        if not self._pump_due:
            self._pump_due = True
            (self._call_soon or asyncio.get_running_loop().call_soon)(self.pump)

    def _place_follower(self, sequence: LiveSequence) -> None:
        """Place a sequence that has waited for the prompt which it shares, or queue it."""
        try:
            self.place_or_enqueue(sequence)
        except Refused as refusal:
            self.refuse(sequence, refusal.error)

    def _overtake(self, queue: ModelQueue[LiveSequence], head: Entry, now: float) -> None:
        """Reserve an engine for the head of a queue that no engine has room for; place smaller ones.

        Not while a sequence in quarantine waits for an engine of its own.
        """
        self._reservations.turn_of(head.item)
        if self._quarantine.waits(queue.model) or not self._reservations.room_elsewhere(queue.model):
            return
        if not self._reservations.reserve(head.item):
            return
        for entry in smaller(queue, head):
            tokens = entry.item.request.kv_tokens
            if self._reservations.room_elsewhere(queue.model, entry.sequences, tokens) and self._dequeue(
                entry.item, now
            ):
                # There may be more of them; other callbacks of the loop come first.
                self._pump_at_end()

    def _enqueue(
        self,
        sequence: LiveSequence,
        entry: Entry,
        now: float,
        *,
        foremost: bool = False,
    ) -> None:
        sequence.apply(SequenceEvent.ENQUEUE)
        self.queues.add(entry, now, foremost=foremost)
        if sequence.quarantined:
            self._quarantine.wait(sequence)

    def _dequeue(self, sequence: LiveSequence, now: float) -> bool:
        """Place a sequence that waits, or refuse it for good. False: it still waits."""
        entry = sequence.entry
        if entry is None:
            return False
        sequence.request.queued_ms = round((now - entry.since) * 1000)
        error = self._try(sequence)
        if error is None:
            self._reservations.release(sequence)
            self.queues.take(entry, now)
            self._metrics.lanes.waited(entry.home, now - entry.since)
            return True
        if error.code in _WAITS:
            if sequence.quarantined:
                self._quarantine.wait(sequence)
            return False
        self.refuse(sequence, error)
        return True

    def _goes_first(self, queue: ModelQueue[LiveSequence], entry: Entry) -> bool:
        """Whether no waiting sequence comes before a new one, and it takes no place reserved for a class."""
        if entry.apart:
            return not self._quarantine.waits(entry.model)
        return not queue.lanes.blocked(entry.home, first=entry.first) and queue.quota.admits(
            entry.home, entry.sequences
        )

    def _look(self, now: float) -> None:
        """Take over the state of the fleet, if it may have changed."""
        if self._stale:
            self._stale = False
            self.queues.refresh(self._fleet, now, self._fleet.knows)

    # Place

    def _try(self, sequence: LiveSequence, *, excluding: Collection[Engine] = ()) -> common_pb2.Error | None:
        """Place a sequence. Returns the reason if that is not possible, else None."""
        try:
            self._place(sequence, excluding=excluding)
        except Refused as refusal:
            return refusal.error
        return None

    def _place(self, sequence: LiveSequence, *, excluding: Collection[Engine] = ()) -> None:
        request, leader = sequence.request, sequence.same_prompt_as
        request.prompt_engine = None if leader is None else leader.engine
        placed = self._placer.place(request, excluding=excluding)
        engine = placed.engine
        validate_task(sequence.spec, engine.model)
        if engine is request.prompt_engine:
            kv_tokens = min(request.kv_tokens, engine.capacity.block_size)
        else:
            kv_tokens = max(0, request.kv_tokens - placed.receipt.matched_tokens)
        sequence.traceparent = trace_placed(sequence.spec, placed.receipt)
        self._send(sequence, engine, kv_tokens)
        if sequence.quarantined:
            self._quarantine.placed(sequence, engine)

    def _send(self, sequence: LiveSequence, engine: Engine, kv_tokens: int) -> None:
        """Submit a sequence to the engine that placement chose."""
        link = self.links.connected(engine)
        if len(link.sequences) == (sequence.engine is engine):
            self._health.got_work(engine)
        self._last_handle += 1
        prompt_alone = sequence.request.placed_part is SplitPart.PROMPT
        sequence.apply(
            SequenceEvent.PLACE_PROMPT if prompt_alone else SequenceEvent.PLACE,
            Target(link, self._last_handle, kv_tokens),
        )
        # Filled in place: a spec with a long prompt takes long to copy.
        message = engine_pb2.AttachResponse()
        submit = message.submit
        submit.handle = sequence.engine_handle
        submit.spec.CopyFrom(sequence.spec)
        submit.alone = sequence.quarantined
        if (leader := sequence.leader_handle()) is not None:
            submit.same_prompt_as = leader
        if sequence.traceparent:
            submit.spec.traceparent = sequence.traceparent
        self.handovers.message(sequence, submit)
        link.submit(message)
        self.handovers.sent(sequence)
        if self.handovers.due:
            self._pump_at_end()


def _next(queue: ModelQueue[LiveSequence]) -> Entry | None:
    """Return the next of a queue that takes no place reserved for a higher class."""
    for head in queue.lanes.heads():
        if queue.quota.admits(head.lane, head.sequences):
            return head
    return None
