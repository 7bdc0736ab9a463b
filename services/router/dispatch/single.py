"""The sink of one plain `Generate` call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from catenary.columns import StepRow, join_logprobs, join_prompt_logprobs
from catenary.v1 import common_pb2, router_pb2
from services.router.admission import Refused


class SingleSink:
    """Merges one sequence's output until its call takes it."""

    def __init__(self) -> None:
        self._row = StepRow(0)
        self._error: common_pb2.Error | None = None
        self._wake = asyncio.Event()

    def row(self, handle: int) -> StepRow:
        """See Sink."""
        self._wake.set()
        return self._row

    def end(self, handle: int, end: common_pb2.SequenceEnd) -> None:
        """See Sink."""
        if self._row.end is None:
            self._row.end = end
        self._wake.set()

    def refuse(self, handle: int, error: common_pb2.Error) -> None:
        """See Sink."""
        self._error = error
        self._wake.set()

    def abort_result(self, handle: int, outcome: common_pb2.AbortOutcome.ValueType) -> None:
        """See Sink. The end of the call is the answer."""

    async def messages(self) -> AsyncIterator[router_pb2.GenerateResponse]:
        """Deltas until the end.

        Raises:
            Refused: the sequence was refused, or failed before its first token.
        """
        first = True
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._error is not None:
                raise Refused.of(self._error)
            row, self._row = self._row, StepRow(0)
            if first and row.end is not None and row.end.HasField("error") and not row.token_ids:
                raise Refused.of(row.end.error)
            first = False
            yield _response(row)
            if row.end is not None:
                return


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
