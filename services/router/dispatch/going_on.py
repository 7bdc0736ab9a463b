"""Where sequences go that an engine has refused, or has done its part of."""

from __future__ import annotations

from catenary.v1 import common_pb2
from services.router.admission import Refused, not_served
from services.router.dispatch.endings import Endings
from services.router.dispatch.intake import Intake
from services.router.dispatch.sequence import LiveSequence, SequenceStatus
from services.router.metrics import RouterMetrics

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
