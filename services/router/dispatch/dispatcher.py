"""The dispatcher: turns messages of clients and engines into steps of sequences. Free of gRPC."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from catenary.columns import StepRow, split
from catenary.resume import GOOD_ENDS
from catenary.seeds import draw_seed
from catenary.telemetry import get_logger, new_id
from catenary.v1 import common_pb2, engine_pb2
from services.router.admission import Admission, QueueOptions, Refused, SpecLimits, validate
from services.router.dispatch.contract import check_row, check_step, complete, presentable
from services.router.dispatch.health import ENGINE_LEFT, Blame, EngineHealth, PoisonBook
from services.router.dispatch.lifecycle import FOR_NOW, CallSoon, Lifecycle
from services.router.dispatch.sequence import (
    NULL_SINK,
    AbortCause,
    EngineLink,
    LiveSequence,
    Sink,
    trace_refused,
)
from services.router.dispatch.states import FINAL, SequenceEvent, SequenceState
from services.router.fleet import Engine
from services.router.metrics import RouterMetrics
from services.router.placement import AnyPlacer, SplitPart, placement_request

_log = get_logger(__name__)

ENGINE_LOST = common_pb2.Error(
    code=common_pb2.ERROR_CODE_ENGINE_LOST,
    message="The engine that ran the request was lost.",
    retryable=True,
)


class Dispatcher:
    """The entry of every message about a sequence. Every method runs to its end without an await.

    So the accounts are exact: load is counted and released in the same tick as the event that causes it.
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
        self._blame = Blame(placer.fleet, health, clock=clock)
        self.lifecycle = Lifecycle(placer, queue_options, metrics, health, clock=clock, call_soon=call_soon)
        self._handovers = self.lifecycle.handovers
        self._spec_limits = spec_limits
        self._abort_timeout_s = abort_timeout_s
        self._clock = clock

    def connect(self, engine: Engine) -> EngineLink:
        """Open the link of an engine that is attached: it may be given sequences from here on."""
        link = self.lifecycle.links.connect(engine)
        self.lifecycle.pump_soon()
        return link

    def link_of(self, engine: Engine) -> EngineLink | None:
        """Return the link of an engine, or None if it is not connected."""
        return self.lifecycle.links.of(engine)

    def submit(
        self,
        handle: int,
        spec: common_pb2.SequenceSpec,
        sink: Sink,
        *,
        same_prompt_as: LiveSequence | None = None,
        resumed: bool = False,
        quarantined: bool = False,
    ) -> LiveSequence:
        """Admit a sequence, and place it on an engine or queue it.

        Args:
            handle: names it to its sink.
            spec: kept, and completed with a seed and an id.
            sink: receives its output and its end; a refusal after a wait, too.
            same_prompt_as: one with the same prompt, whose engine is preferred if that has room.
            resumed: it was admitted before: it waits in front of others, and no queue is too full for it.
            quarantined: its engine computes nothing else until its first token.

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
            guard = self.lifecycle.admit(self._admission, spec, resumed=resumed)
            request = placement_request(spec, quarantined=quarantined)
            sequence = LiveSequence(handle, spec, sink, guard, request, same_prompt_as, resumed=resumed)
            if self._handovers.begin(sequence, resumed=resumed):
                return sequence
            try:
                self.lifecycle.place_or_enqueue(sequence)
            except BaseException:
                self.lifecycle.release(sequence, SequenceEvent.REFUSE)
                raise
        except Refused as refusal:
            self._metrics.refused(refusal.error.code)
            trace_refused(spec, refusal.error, 0.0)
            raise
        return sequence

    def abort(self, sequence: LiveSequence, cause: AbortCause, *, answer: bool = False) -> None:
        """Abort a sequence whose sink still takes its end; with `answer`, the outcome too. Idempotent."""
        if sequence.state in FINAL:
            return
        if answer:
            if sequence.abort_wanted_answer:
                sequence.sink.abort_result(sequence.handle, common_pb2.ABORT_OUTCOME_ABORTED)
            sequence.abort_wanted_answer = True
        if sequence.state is SequenceState.ABORTING:
            return
        self._metrics.aborted(cause)
        self.lifecycle.abort(sequence)

    def abandon(self, sequence: LiveSequence, cause: AbortCause) -> None:
        """Abort a sequence whose client is gone: nothing of it reaches its sink any more."""
        sequence.sink = NULL_SINK
        self.abort(sequence, cause)

    def on_step(self, link: EngineLink, step: common_pb2.StepOutput) -> None:
        """Pass a step's rows to their sinks. Rows of sequences that are not (or no longer) here are ignored.

        Raises:
            MalformedStep: the engine broke the contract; the caller ends its attachment.
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
        """Retry a sequence that an engine refused, once and if that may help; else pass the refusal on."""
        sequence = link.sequences.get(refusal.handle)
        if sequence is None:
            return
        error = presentable(refusal.error)
        if error.code == common_pb2.ERROR_CODE_ENGINE_LOST:
            self._health.failed(link.engine)
        elif error.code == common_pb2.ERROR_CODE_INTERNAL:
            self._blame.failed(link.engine, [sequence.spec])
        if sequence.state is SequenceState.ABORTING:
            self.lifecycle.end(sequence, sequence.ending(common_pb2.FINISH_REASON_ABORT))
        elif sequence.state is SequenceState.PREFILLING:
            link.engine.full = link.engine.full or error.code in FOR_NOW
            self._unsplit(sequence, "refused")
        elif sequence.state is SequenceState.RUNNING:
            self.lifecycle.end(sequence, sequence.ending(common_pb2.FINISH_REASON_ERROR, error))
        elif not (error.retryable and self.lifecycle.retry_elsewhere(sequence, error.code)):
            _log.debug("sequence refused", sequence=sequence.spec.request_id, engine=link.engine.name)
            self.lifecycle.refuse(sequence, (error.retryable and self.lifecycle.closed) or error)

    def on_abort_result(self, link: EngineLink, result: engine_pb2.AbortResult) -> None:
        """Pass an engine's answer to an abort on, and end a sequence that the engine does not know."""
        sequence = link.sequences.get(result.handle)
        if sequence is None or sequence.state is not SequenceState.ABORTING:
            return
        if result.outcome == common_pb2.ABORT_OUTCOME_ABORTED:
            self.lifecycle.answer_abort(sequence, common_pb2.ABORT_OUTCOME_ABORTED)
        else:
            self.lifecycle.end(sequence, sequence.ending(common_pb2.FINISH_REASON_ABORT))

    def lose(self, link: EngineLink, *, died: bool) -> int:
        """End the sequences of an engine that is gone, so that they are resumed on others.

        `died`: the loss counts against the requests that the engine had in their first forward.

        Returns:
            The number of sequences.
        """
        self.lifecycle.links.drop(link.engine)
        self._placer.forget(link.engine)
        lost = list(link.sequences.values())
        for sequence in lost:
            if sequence.state is SequenceState.ABORTING:
                self.lifecycle.end(sequence, sequence.ending(common_pb2.FINISH_REASON_ABORT))
            else:
                self._handovers.lost(sequence)
                error = self._poison.judge(sequence, ENGINE_LOST if died else ENGINE_LEFT)
                self.lifecycle.end(sequence, sequence.ending(common_pb2.FINISH_REASON_ERROR, error))
        return len(lost)

    def give_up(self, link: EngineLink, error: common_pb2.Error, cause: AbortCause) -> int:
        """End the sequences of a connected engine with `error`, and have it abort them.

        Returns:
            The number of sequences.
        """
        ended = [s for s in link.sequences.values() if s.state is not SequenceState.ABORTING]
        for sequence in ended:
            self._handovers.lost(sequence)
            sequence.ends_as = "stalled" if cause is AbortCause.STALLED else "error"
            judged = self._poison.judge(sequence, error)
            sequence.sink.end(sequence.handle, sequence.ending(common_pb2.FINISH_REASON_ERROR, judged))
            self.abandon(sequence, cause)
        return len(ended)

    def sweep(self) -> None:
        """End aborts that an engine has not confirmed in time, so that no load is counted for ever."""
        self.lifecycle.end_aborts(self._clock() - self._abort_timeout_s)

    def _emit(self, sequence: LiveSequence, row: StepRow) -> None:
        sequence.emitted += len(row.token_ids)
        check_row(sequence, row)
        if sequence.state is not SequenceState.RUNNING:
            self._first_output(sequence)
        sequence.sink.row(sequence.handle).append(row)

    def _first_output(self, sequence: LiveSequence) -> None:
        if sequence.state is SequenceState.ABORTING:
            return
        sequence.apply(SequenceEvent.OUTPUT)
        self._handovers.started(sequence)
        if sequence.quarantined:
            self.lifecycle.accompany(sequence)

    def _finish(self, sequence: LiveSequence, end: common_pb2.SequenceEnd, token_ids: Sequence[int]) -> None:
        """Apply an engine's end, with its last tokens, to a sequence."""
        lost = end.error.code == common_pb2.ERROR_CODE_ENGINE_LOST
        if lost or sequence.request.placed_part is not SplitPart.PROMPT:
            end = complete(sequence, end, token_ids)
            if lost:
                self._handovers.lost(sequence)
            if end.HasField("error"):
                end.error.CopyFrom(self._poison.judge(sequence, end.error))
            self.lifecycle.end(sequence, end)
        elif sequence.state is SequenceState.ABORTING:
            self.lifecycle.end(sequence, sequence.ending(common_pb2.FINISH_REASON_ABORT))
        else:
            self._handovers.prompt_ended(sequence, end)
            self.lifecycle.retry(sequence)

    def _unsplit(self, sequence: LiveSequence, why: str) -> None:
        self._handovers.unsplit(sequence, why)
        self.lifecycle.retry(sequence)
