"""One batch on its way: from its input file to the files of its results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from catenary.telemetry import new_id
from gateway.batches.files import FileStore
from gateway.batches.lines import (
    BatchLine,
    LineResult,
    check_lines,
    read_line,
    result_line,
    split_lines,
    unrun_line,
)
from gateway.batches.objects import BatchProblem, BatchStatus
from gateway.batches.store import BatchStore, ClaimedBatch, Outcome

_BULK = 256
_UNRUN = {
    BatchStatus.EXPIRED: ("batch_expired", "The batch expired before this request was run."),
    BatchStatus.CANCELLED: ("batch_cancelled", "The batch was cancelled before this request was run."),
}

RunLine = Callable[[ClaimedBatch, BatchLine], Awaitable[LineResult]]
"""Answers a line, however long that takes; cancelling it gives the request up."""


@dataclass(frozen=True, slots=True)
class JobLimits:
    """Requests of a file, bytes of a line, strings, arrays and objects in a line, and lines of one batch
    at work or about to be."""

    max_lines: int
    max_line_bytes: int
    max_line_values: int
    most_at_work: int


class BatchJob:
    """Runs one batch that its gateway has claimed.

    A line's result is written down once, in the same transaction in which it is counted, and only while the
    gateway holds the batch. So a gateway that goes on with the batch after a crash skips
    exactly the lines that the files show."""

    def __init__(
        self,
        claim: ClaimedBatch,
        *,
        runner: str,
        batches: BatchStore,
        files: FileStore,
        run_line: RunLine,
        limits: JobLimits,
        clock: Callable[[], float],
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing runs yet.

        Args:
            claim: the batch.
            runner: the gateway that has claimed it.
            batches: where it is.
            files: where its input is.
            run_line: what answers a line, when there is a place for it.
            limits: of its input.
            clock: Unix time. It is read once, since an administrator or NTP may set it.
            elapsed: seconds of a monotonic clock.
        """
        self.batch_id = claim.batch.id
        self._claim = claim
        self._runner = runner
        self._batches = batches
        self._files = files
        self._run_line = run_line
        self._limits = limits
        self._elapsed = elapsed
        self._deadline = elapsed() + claim.batch.expires_at - clock()
        self._stop = asyncio.Event()
        self._cancelled = asyncio.Event()
        self._end = BatchStatus.COMPLETED

    async def run(self) -> None:
        """Bring the batch to its end, from wherever it is. Raises LeaseLost, or ApiError 503 of the store.
        Then, and when it is cancelled, what is written down stays, and the batch can be gone on with."""
        batch = self._claim.batch
        if batch.status is BatchStatus.CANCELLING:
            self._finish_early(BatchStatus.CANCELLED)
        elif self._elapsed() >= self._deadline:
            self._finish_early(BatchStatus.EXPIRED)
        if batch.in_progress_at is None or not self._cancelled.is_set():
            checked = await self._check_lines()
            if checked is None:
                await self._batches.finish(self._runner, self._claim, BatchStatus.CANCELLED)
                return
            total, problems = checked
            if problems:
                await self._batches.finish(self._runner, self._claim, BatchStatus.FAILED, problems)
                return
            await self._batches.started(self._runner, batch.id, total)
        await self._run_lines()
        await self._explain_unrun()
        await self._batches.finalizing(self._runner, batch.id)
        await self._batches.finish(self._runner, self._claim, self._end)

    async def check(self) -> None:
        """Hold the batch for another while; end it when it was cancelled or is too late. Raises LeaseLost."""
        status = await self._batches.renew(self._runner, self._claim.batch.id)
        if status is BatchStatus.CANCELLING:
            self._finish_early(BatchStatus.CANCELLED)
        elif self._elapsed() >= self._deadline:
            self._finish_early(BatchStatus.EXPIRED)

    def _finish_early(self, end: BatchStatus) -> None:
        if end is BatchStatus.CANCELLED:
            self._cancelled.set()
        if not self._stop.is_set():
            self._end = end
            self._stop.set()

    async def _check_lines(self) -> tuple[int, list[BatchProblem]] | None:
        """As `check_lines`; None: the batch was cancelled before all were read."""
        limits = self._limits
        check = asyncio.create_task(
            check_lines(self._lines(), self._claim.batch.endpoint, limits.max_lines, limits.max_line_values)
        )
        cancelled = asyncio.create_task(self._cancelled.wait())
        try:
            await asyncio.wait({check, cancelled}, return_when=asyncio.FIRST_COMPLETED)
            return None if self._cancelled.is_set() else check.result()
        finally:
            for task in (check, cancelled):
                task.cancel()
            await asyncio.gather(check, cancelled, return_exceptions=True)

    def _lines(self) -> AsyncIterator[tuple[int, bytes | None]]:
        pieces = self._files.content(self._claim.batch.input_file_id)
        return split_lines(pieces, self._limits.max_line_bytes)

    async def _todo(self) -> AsyncIterator[BatchLine]:
        done = await self._batches.done(self._claim)
        async for number, data in self._lines():
            if data and number not in done:
                yield read_line(number, data, self._claim.batch.endpoint)

    async def _run_lines(self) -> None:
        todo, reading = self._todo(), asyncio.Lock()
        stopped = asyncio.create_task(self._stop.wait())
        workers = [asyncio.create_task(self._work(todo, reading)) for _ in range(self._limits.most_at_work)]
        pending: set[asyncio.Task[Any]] = set(workers)
        try:
            while pending and not self._stop.is_set():
                done, pending = await asyncio.wait({stopped, *pending}, return_when=asyncio.FIRST_COMPLETED)
                pending.discard(stopped)
                for task in done:
                    task.result()
        finally:
            for task in (stopped, *workers):
                task.cancel()
            await asyncio.gather(stopped, *workers, return_exceptions=True)

    async def _work(self, todo: AsyncIterator[BatchLine], reading: asyncio.Lock) -> None:
        while True:
            async with reading:
                line = await anext(todo, None)
            if line is None:
                return
            await self._run_one(line)

    async def _run_one(self, line: BatchLine) -> None:
        result = await self._run_line(self._claim, line)
        outcome = Outcome(line.number, result.failed, result_line(line.custom_id, result, new_id))
        await self._batches.record(self._runner, self._claim, [outcome])

    async def _explain_unrun(self) -> None:
        if self._end not in _UNRUN:
            return
        code, message = _UNRUN[self._end]
        outcomes: list[Outcome] = []
        async for line in self._todo():
            outcomes.append(Outcome(line.number, True, unrun_line(line.custom_id, code, message, new_id)))
            if len(outcomes) >= _BULK:
                await self._batches.record(self._runner, self._claim, outcomes)
                outcomes = []
        if outcomes:
            await self._batches.record(self._runner, self._claim, outcomes)
