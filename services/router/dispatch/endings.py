"""How sequences leave the router: one end or refusal for each, and every count given back."""

from __future__ import annotations

from collections.abc import Callable

from catenary.v1 import common_pb2
from services.router.dispatch.handover import Handovers
from services.router.dispatch.intake import Intake
from services.router.dispatch.sequence import LiveSequence, SequenceStatus
from services.router.dispatch.spans import trace_refused
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
