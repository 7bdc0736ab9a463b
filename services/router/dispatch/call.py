"""The one sequence of a plain `Generate` call, with all of its attempts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from catenary.columns import StepRow, join_logprobs, join_prompt_logprobs
from catenary.resume import GOOD_ENDS, Cause, Failure, Finished, Resumable, ResumePolicy, Retry
from catenary.v1 import common_pb2, router_pb2
from services.router.admission import Refused
from services.router.dispatch.dispatcher import Dispatcher
from services.router.dispatch.sequence import AbortCause, LiveSequence


class PlainCall:
    """The sink of the sequence: merges its output until the call takes it, and resumes it after a loss."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        spec: common_pb2.SequenceSpec,
        policy: ResumePolicy,
        on_resumed: Callable[[Cause], None],
    ) -> None:
        """Submit the sequence, inside of the running loop. Raises Refused."""
        self._dispatcher = dispatcher
        self._on_resumed = on_resumed
        self._loop = asyncio.get_running_loop()
        self._resumable = Resumable(spec, policy)
        # Unread output of the attempts that are over, and of this one.
        self._past = StepRow(0)
        self._row = StepRow(0)
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        # Why the last attempt failed, until there is another one.
        self._lost_by: Cause | None = None
        self._sequence = self._submit()

    @property
    def request_id(self) -> str:
        return self._resumable.request_id

    def row(self, handle: int) -> StepRow:
        """See Sink."""
        self._wake.set()
        return self._row

    def end(self, handle: int, end: common_pb2.SequenceEnd) -> None:
        """See Sink."""
        self._take_row()
        if end.reason in GOOD_ENDS:
            self._resumable.settle(end.usage)
            self._finish(end)
        else:
            self._failed(Failure.of_end(end))

    def refuse(self, handle: int, error: common_pb2.Error) -> None:
        """See Sink."""
        self._failed(Failure.of_refusal(error))

    def abort_result(self, handle: int, outcome: common_pb2.AbortOutcome.ValueType) -> None:
        """See Sink. The end of the call is the answer."""

    def give_up(self, error: common_pb2.Error, cause: AbortCause) -> None:
        """End the call with an error, which waits for the client."""
        self.abandon(cause)
        # It is not resumed, so a row that may be very long is not recorded.
        self._take_row(last=True)
        self._finish(self._failure(error))

    def abandon(self, cause: AbortCause) -> None:
        """Abort the sequence: its client is gone. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._dispatcher.abandon(self._sequence, cause)

    async def messages(self) -> AsyncIterator[router_pb2.GenerateResponse]:
        """Yield deltas until the end.

        Raises:
            Refused: the sequence was refused, or failed before its first token.
        """
        first = True
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._take_row()
            row, self._past = self._past, StepRow(0)
            if first and row.end is not None and row.end.HasField("error") and not row.token_ids:
                raise Refused.of(row.end.error)
            if row.token_ids or row.prompt_logprobs is not None or row.end is not None:
                first = False
                yield _response(row)
            if row.end is not None:
                return

    def _submit(self) -> LiveSequence:
        attempt = self._resumable
        return self._dispatcher.submit(
            0, attempt.spec(), self, resumed=attempt.resumed, quarantined=attempt.quarantined
        )

    def _retry(self) -> None:
        self._timer = None
        try:
            self._sequence = self._submit()
        except Refused as refusal:
            if refusal.error.code == common_pb2.ERROR_CODE_DRAINING:
                # This router takes nothing any more, from any client.
                self._finish(self._failure(refusal.error))
            else:
                self._failed(Failure.of_refusal(refusal.error))
            return
        if self._lost_by is not None:
            self._on_resumed(self._lost_by)
            self._lost_by = None

    def _failed(self, failure: Failure) -> None:
        verdict = self._resumable.after(failure, self._loop.time())
        if isinstance(verdict, Retry):
            if not failure.refused:
                self._lost_by = verdict.cause
            self._timer = self._loop.call_later(verdict.delay_s, self._retry)
        elif isinstance(verdict, Finished):
            self._finish(verdict.end)
        else:
            self._finish(self._failure(verdict.error))

    def _failure(self, error: common_pb2.Error) -> common_pb2.SequenceEnd:
        return self._sequence.ending(common_pb2.FINISH_REASON_ERROR, error)

    def _finish(self, end: common_pb2.SequenceEnd) -> None:
        if self._past.end is None:
            self._past.end = end
        self._wake.set()

    def _take_row(self, *, last: bool = False) -> None:
        """Move the output of this attempt to the unread output, without what earlier attempts brought."""
        row, self._row = self._row, StepRow(0)
        if not last:
            self._resumable.record(row.token_ids)
        if row.prompt_logprobs is not None:
            known = self._resumable.record_prompt(len(row.prompt_logprobs.sampled))
            row.prompt_logprobs = row.prompt_logprobs.without_first(known)
        if self._past.token_ids or self._past.prompt_logprobs is not None:
            self._past.append(row)
        else:
            row.end, self._past = self._past.end, row


def _response(row: StepRow) -> router_pb2.GenerateResponse:
    if row.end is not None:
        row.end.row = 0
    return router_pb2.GenerateResponse(
        token_ids=row.token_ids,
        logprobs=join_logprobs([(0, row.logprobs)]) if row.logprobs is not None else None,
        end=row.end,
        prompt_logprobs=(
            join_prompt_logprobs([(0, row.prompt_logprobs)]) if row.prompt_logprobs is not None else None
        ),
    )
