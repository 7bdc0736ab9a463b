"""The heart of the router: sequences between their sinks and their engines. Synchronous, no transport."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from catenary.columns import StepRow, split
from catenary.resume import GOOD_ENDS
from catenary.seeds import draw_seed
from catenary.telemetry import get_logger, new_id
from catenary.v1 import common_pb2, engine_pb2
from services.router.admission import (
    Admission,
    QueueOptions,
    Refused,
    SpecLimits,
    validate,
)
from services.router.dispatch.contract import check_row, check_step, complete, presentable
from services.router.dispatch.endings import FOR_NOW, Endings, GoingOn
from services.router.dispatch.engine_links import EngineLinks
from services.router.dispatch.handover import Handovers
from services.router.dispatch.health import ENGINE_LEFT, Blame, EngineHealth, PoisonBook
from services.router.dispatch.intake import CallSoon, Intake
from services.router.dispatch.sequence import (
    NULL_SINK,
    AbortCause,
    EngineLink,
    LiveSequence,
    SequenceStatus,
    Sink,
    trace_refused,
)
from services.router.fleet import Engine
from services.router.metrics import RouterMetrics
from services.router.placement import AnyPlacer, Half, placement_request

_log = get_logger(__name__)

ENGINE_LOST = common_pb2.Error(
    code=common_pb2.ERROR_CODE_ENGINE_LOST,
    message="The engine that ran the request was lost.",
    retryable=True,
)


class Dispatcher:
    """Admits, places and ends sequences. Every method runs to its end without an await.

    That is what makes the accounts exact: load is counted and given back in the same tick as the event that
    causes it, whatever else is going on.
    """

    def __init__(
        self,
        admission: Admission,
        placer: AnyPlacer,
        metrics: RouterMetrics,
        health: EngineHealth,
        *,
        spec_limits: SpecLimits,
        queue_options: QueueOptions,
        poison: PoisonBook,
        abort_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        call_soon: CallSoon | None = None,
    ) -> None:
        self._admission = admission
        self._metrics = metrics
        self._health = health
        self._placer = placer
        self._poison = poison
        self._handovers = Handovers(
            metrics.handovers,
            placer.fleet,
            enter=lambda sequence: self._going_on.enter(sequence),
            call_soon=call_soon,
        )
        self._links = EngineLinks(self._handovers, health)
        self._blame = Blame(placer.fleet, health, clock=clock)
        # What waits, and what there is to know of it.
        self.intake = Intake(
            placer,
            queue_options,
            self._links,
            refuse=lambda sequence, error: self._endings.refuse(sequence, error),
            waited=metrics.lanes.waited,
            clock=clock,
            call_soon=call_soon,
        )
        self._endings = Endings(metrics, self.intake, self._handovers, clock)
        self._going_on = GoingOn(self.intake, self._endings, metrics)
        self._spec_limits = spec_limits
        self._abort_timeout_s = abort_timeout_s
        self._clock = clock

    def connect(self, engine: Engine) -> EngineLink:
        """An engine is attached: it may be given sequences from here on."""
        link = self._links.connect(engine)
        self.intake.pump_soon()
        return link

    def link_of(self, engine: Engine) -> EngineLink | None:
        """The link of a connected engine."""
        return self._links.of(engine)

    def submit(
        self,
        handle: int,
        spec: common_pb2.SequenceSpec,
        sink: Sink,
        *,
        same_prompt_as: LiveSequence | None = None,
        resumed: bool = False,
        alone: bool = False,
    ) -> LiveSequence:
        """Admit a sequence: send it to an engine, or let it wait for one. `spec` is kept, and completed with
        a seed and an id.

        Args:
            handle: names it to its sink.
            spec: what to generate.
            sink: receives what becomes of it; a refusal after a wait too.
            same_prompt_as: one with the same prompt; it goes to the same engine, if that one has room.
            resumed: it was admitted before: it waits in front of others, and no queue is too full for it.
            alone: an engine is to compute nothing else until its first token.

        Raises:
            Refused: it was not accepted, and nothing is counted.
        """
        self._metrics.submits.inc()
        try:
            validate(spec, self._spec_limits)
            self._poison.check(spec)
            spec.request_id = spec.request_id or new_id("seq-")
            if not spec.HasField("pooling") and not spec.sampling.HasField("seed"):
                spec.sampling.seed = draw_seed()
            guard = self.intake.let_in(self._admission, spec, resumed=resumed)
            request = placement_request(spec, alone=alone)
            sequence = LiveSequence(handle, spec, sink, guard, request, same_prompt_as, resumed=resumed)
            if self._handovers.begin(sequence, resumed=resumed):
                return sequence
            try:
                self.intake.enter(sequence)
            except BaseException:
                guard.release()
                self.intake.forget(sequence)
                raise
        except Refused as refusal:
            self._metrics.refused(refusal.error.code)
            trace_refused(spec, refusal.error, 0.0)
            raise
        return sequence

    def abort(self, sequence: LiveSequence, cause: AbortCause, *, answer: bool = False) -> None:
        """Abort for a reader that still reads; with `answer`, its sink gets the outcome. Idempotent."""
        if sequence.status is SequenceStatus.ENDED:
            return
        if answer:
            if sequence.abort_wanted_answer:
                sequence.sink.abort_result(sequence.handle, common_pb2.ABORT_OUTCOME_ABORTED)
            sequence.abort_wanted_answer = True
        if sequence.status is SequenceStatus.ABORTING:
            return
        self._metrics.aborted(cause)
        if sequence.status is SequenceStatus.QUEUED:
            self._endings.end(sequence, sequence.ending(common_pb2.FINISH_REASON_ABORT))
            return
        sequence.status = SequenceStatus.ABORTING
        sequence.aborted_at = self._clock()
        if sequence.link.abort(sequence.engine_handle):
            self._endings.end(sequence, sequence.ending(common_pb2.FINISH_REASON_ABORT))
        else:
            self._endings.aborting[sequence.engine_handle] = sequence

    def abandon(self, sequence: LiveSequence, cause: AbortCause) -> None:
        """Abort for a reader that is gone: nothing of the sequence reaches its sink any more."""
        sequence.sink = NULL_SINK
        self.abort(sequence, cause)

    def on_step(self, link: EngineLink, step: common_pb2.StepOutput) -> None:
        """Pass a step's rows to their sinks. Rows of sequences that are not (or no longer) here are ignored.

        Raises:
            MalformedStep: the engine broke the contract; the caller gives it up.
        """
        check_step(step, link.engine.model.vocab_size)
        sequences = link.sequences
        died, failed = False, []
        for row in split(step):
            sequence = sequences.get(row.handle)
            if sequence is None:
                continue
            if row.token_ids or row.prompt_logprobs is not None:
                self._emit(sequence, row)
            if row.end is not None:
                self._finish(sequence, row.end, row.token_ids)
                if row.end.error.code == common_pb2.ERROR_CODE_ENGINE_LOST:
                    died = True
                elif row.end.error.code == common_pb2.ERROR_CODE_INTERNAL:
                    failed.append(sequence.spec)
                elif row.end.reason in GOOD_ENDS:
                    self._health.succeeded(link.engine)
        # One fault, however many sequences it cost.
        if died:
            self._health.failed(link.engine)
        elif failed:
            self._blame.failed(link.engine, failed)

    def on_refusal(self, link: EngineLink, refusal: common_pb2.Refusal) -> None:
        """An engine did not accept: ask another one once if that may help, else pass its refusal on."""
        sequence = link.sequences.get(refusal.handle)
        if sequence is None:
            return
        error = presentable(refusal.error)
        if error.code == common_pb2.ERROR_CODE_ENGINE_LOST:
            self._health.failed(link.engine)
        elif error.code == common_pb2.ERROR_CODE_INTERNAL:
            self._blame.failed(link.engine, [sequence.spec])
        if sequence.status is SequenceStatus.ABORTING:
            self._endings.end(sequence, sequence.ending(common_pb2.FINISH_REASON_ABORT))
        elif sequence.request.placed is Half.PROMPT:
            link.engine.full = link.engine.full or error.code in FOR_NOW
            self._go_whole(sequence, "refused")
        elif sequence.status is SequenceStatus.RUNNING:
            self._endings.end(sequence, sequence.ending(common_pb2.FINISH_REASON_ERROR, error))
        elif not (error.retryable and self._going_on.elsewhere(sequence, error.code)):
            _log.debug("sequence refused", sequence=sequence.spec.request_id, engine=link.engine.name)
            self._endings.refuse(sequence, (error.retryable and self.intake.closed) or error)

    def on_abort_result(self, link: EngineLink, result: engine_pb2.AbortResult) -> None:
        """The engine answered an abort. One that does not know the sequence will not end it: end it here."""
        sequence = link.sequences.get(result.handle)
        if sequence is None or sequence.status is not SequenceStatus.ABORTING:
            return
        if result.outcome == common_pb2.ABORT_OUTCOME_ABORTED:
            self._endings.answer_abort(sequence, common_pb2.ABORT_OUTCOME_ABORTED)
        else:
            self._endings.end(sequence, sequence.ending(common_pb2.FINISH_REASON_ABORT))

    def lose(self, link: EngineLink, *, died: bool) -> int:
        """The engine is gone: end what it ran, so that it goes on elsewhere. Unless it `died`, that speaks
        against no engine or request. Returns how many sequences that were."""
        self._links.drop(link.engine)
        self._placer.forget(link.engine)
        lost = list(link.sequences.values())
        for sequence in lost:
            if sequence.status is SequenceStatus.ABORTING:
                self._endings.end(sequence, sequence.ending(common_pb2.FINISH_REASON_ABORT))
            else:
                self._handovers.lost(sequence)
                error = self._poison.judge(sequence, ENGINE_LOST if died else ENGINE_LEFT)
                self._endings.end(sequence, sequence.ending(common_pb2.FINISH_REASON_ERROR, error))
        return len(lost)

    def give_up(self, link: EngineLink, error: common_pb2.Error, cause: AbortCause) -> int:
        """The engine is there and is not waited for: end what it runs, and abort it there.

        Returns:
            How many sequences end with `error`.
        """
        ended = [s for s in link.sequences.values() if s.status is not SequenceStatus.ABORTING]
        for sequence in ended:
            self._handovers.lost(sequence)
            sequence.ends_as = "stalled" if cause is AbortCause.STALLED else "error"
            judged = self._poison.judge(sequence, error)
            sequence.sink.end(sequence.handle, sequence.ending(common_pb2.FINISH_REASON_ERROR, judged))
            self.abandon(sequence, cause)
        return len(ended)

    def sweep(self) -> None:
        """Give up aborts that an engine has not confirmed in time, so that no load is counted for ever."""
        limit = self._clock() - self._abort_timeout_s
        for sequence in [s for s in self._endings.aborting.values() if s.aborted_at < limit]:
            self._endings.end(sequence, sequence.ending(common_pb2.FINISH_REASON_ABORT))

    def _emit(self, sequence: LiveSequence, row: StepRow) -> None:
        sequence.emitted += len(row.token_ids)
        check_row(sequence, row)
        if sequence.status is SequenceStatus.PLACED:
            sequence.status = SequenceStatus.RUNNING
            sequence.guard.prefilled()
            self._handovers.started(sequence)
            if sequence.alone:
                self.intake.accompany(sequence)
        sequence.sink.row(sequence.handle).append(row)

    def _finish(self, sequence: LiveSequence, end: common_pb2.SequenceEnd, token_ids: Sequence[int]) -> None:
        """Apply an engine's end, with its last tokens, to a sequence."""
        lost = end.error.code == common_pb2.ERROR_CODE_ENGINE_LOST
        if lost or sequence.request.placed is not Half.PROMPT:
            end = complete(sequence, end, token_ids)
            if lost:
                self._handovers.lost(sequence)
            if end.HasField("error"):
                end.error.CopyFrom(self._poison.judge(sequence, end.error))
            self._endings.end(sequence, end)
        elif sequence.status is SequenceStatus.ABORTING:
            self._endings.end(sequence, sequence.ending(common_pb2.FINISH_REASON_ABORT))
        else:
            self._handovers.first_half_ended(sequence, end)
            self._going_on.again(sequence)

    def _go_whole(self, sequence: LiveSequence, why: str) -> None:
        self._handovers.go_whole(sequence, why)
        self._going_on.again(sequence)
