"""Sequences that leave their engine: for another one, for the queue, or for good.

Each gets one end or refusal, and every count is given back.
"""

from __future__ import annotations

from collections.abc import Callable

from catenary.v1 import common_pb2
from services.router.admission import Refused, not_served
from services.router.dispatch.handover import Handovers
from services.router.dispatch.intake import Intake
from services.router.dispatch.sequence import LiveSequence, SequenceStatus, trace_refused
from services.router.metrics import RouterMetrics


class Endings:
    """Tells sinks of ends. `aborting` are those whose engine has not confirmed an abort, by engine handle."""

    def __init__(
        self, metrics: RouterMetrics, intake: Intake, handovers: Handovers, clock: Callable[[], float]
    ) -> None:
        self._metrics = metrics
        self._intake = intake
        self._handovers = handovers
        self._clock = clock
        self.aborting: dict[int, LiveSequence] = {}

    def end(self, sequence: LiveSequence, end: common_pb2.SequenceEnd) -> None:
        """The sequence has ended so."""
        self._handovers.ended(sequence, end)
        self._forget(sequence)
        self._metrics.ended(end.reason, sequence.ends_as)
        sequence.sink.end(sequence.handle, end)
        aborted = end.reason == common_pb2.FINISH_REASON_ABORT
        self.answer_abort(
            sequence,
            common_pb2.ABORT_OUTCOME_ABORTED if aborted else common_pb2.ABORT_OUTCOME_ALREADY_FINISHED,
        )

    def refuse(self, sequence: LiveSequence, error: common_pb2.Error) -> None:
        """It was admitted, and no engine has taken it."""
        self._metrics.refused(error.code)
        waited_s = 0.0 if sequence.ticket is None else self._clock() - sequence.ticket.since
        trace_refused(sequence.spec, error, waited_s)
        self._forget(sequence)
        sequence.sink.refuse(sequence.handle, error)

    def answer_abort(self, sequence: LiveSequence, outcome: common_pb2.AbortOutcome.ValueType) -> None:
        """Answer the callers that asked for an abort and have no answer yet."""
        if sequence.abort_wanted_answer:
            sequence.abort_wanted_answer = False
            sequence.sink.abort_result(sequence.handle, outcome)

    def _forget(self, sequence: LiveSequence) -> None:
        had_engine = sequence.engine is not None
        self._handovers.forget(sequence)
        sequence.status = SequenceStatus.ENDED
        sequence.same_prompt_as = None
        if had_engine:
            sequence.link.sequences.pop(sequence.engine_handle, None)
            self.aborting.pop(sequence.engine_handle, None)
        sequence.guard.release()
        self._intake.forget(sequence)


# A request that one engine refused is offered to one other.
MAX_PLACEMENTS = 2
# What an engine refuses with these it may take later.
FOR_NOW = frozenset(
    {common_pb2.ERROR_CODE_OVERLOADED, common_pb2.ERROR_CODE_DRAINING, common_pb2.ERROR_CODE_UNAVAILABLE}
)


class GoingOn:
    """Places sequences once more, or lets them wait in front of others."""

    def __init__(self, intake: Intake, endings: Endings, metrics: RouterMetrics) -> None:
        self._intake = intake
        self._endings = endings
        self._metrics = metrics

    def elsewhere(self, sequence: LiveSequence, code: common_pb2.ErrorCode.ValueType) -> bool:
        """Give a refused sequence to another engine, or let it wait again. False if neither can be."""
        link, handle = sequence.link, sequence.engine_handle
        sequence.refused_by.append(link.engine)
        comes_back = code in FOR_NOW
        # Until its next report it is not asked again.
        link.engine.full = link.engine.full or comes_back
        other = len(sequence.refused_by) < MAX_PLACEMENTS
        if not (other and self._intake.place_again(sequence, excluding=sequence.refused_by)):
            if not (comes_back and self._intake.wait_again(sequence)):
                return False
            sequence.status = SequenceStatus.QUEUED
            sequence.refused_by.clear()
        del link.sequences[handle]
        self._metrics.placed_again.inc()
        return True

    def again(self, sequence: LiveSequence) -> None:
        """Take a sequence from its engine; place it for what comes next, or let it wait for that."""
        sequence.link.sequences.pop(sequence.engine_handle, None)
        if self._intake.place_again(sequence, excluding=()):
            return
        if self._intake.wait_between(sequence):
            sequence.status = SequenceStatus.QUEUED
            return
        self._endings.refuse(sequence, self._intake.closed or not_served().error)

    def enter(self, sequence: LiveSequence) -> None:
        """Place one that has waited for another with the same prompt, or let it wait for an engine."""
        try:
            self._intake.enter(sequence)
        except Refused as refusal:
            self._endings.refuse(sequence, refusal.error)
