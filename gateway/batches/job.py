"""Run of one batch: from its input file to the files of its results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from catenary.telemetry import new_id
from gateway.batches.files import FileStore
from gateway.batches.objects import BatchProblem, BatchStatus
from gateway.batches.store import BatchStore, ClaimedBatch, Outcome
from gateway.http.request import NUMBERS, Turns, decode_json, too_many_values

# Length of names that results repeat (OpenAI gives no figure), and problems in one report.
MAX_CUSTOM_ID = 512
MAX_PROBLEMS = 100
# Byte order mark, which tools of Windows put in front of UTF-8.
_MARK = b"\xef\xbb\xbf"
_FIELDS = frozenset({"custom_id", "method", "url", "body"})


@dataclass(frozen=True, slots=True)
class BatchLine:
    """Request of a batch. `number` counts the lines of the file from 1."""

    number: int
    custom_id: str
    body: dict[str, Any]


class LineError(ValueError):
    """Line that is not a valid request."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param

    def problem(self, line: int) -> BatchProblem:
        """Return the problem that the batch shows."""
        return BatchProblem(self.code, self.message, line, self.param)


async def split_lines(
    pieces: AsyncIterator[bytes], max_bytes: int
) -> AsyncIterator[tuple[int, bytes | None]]:
    """Yield lines with their numbers, however the file is cut into pieces; let other tasks run in between.

    A blank line is yielded as empty, one of more than `max_bytes` as None; no more than about that much is
    held. A byte order mark in front of the first line is left out."""
    turns = Turns()
    number, held, too_long = 1, bytearray(), False

    def line() -> bytes | None:
        if too_long or len(held) > max_bytes:
            return None
        return bytes(held) if held.strip() else b""

    async for piece in pieces:
        start = 0
        while (end := piece.find(b"\n", start)) >= 0:
            held += piece[start:end]
            if number == 1:
                _drop_mark(held)
            yield number, line()
            await turns.between()
            number, held, too_long, start = number + 1, bytearray(), False, end + 1
        held += piece[start:]
        if len(held) > max_bytes + len(_MARK):
            too_long, held = True, bytearray()
    if number == 1:
        _drop_mark(held)
    if too_long or held:
        yield number, line()


def _drop_mark(held: bytearray) -> None:
    if held.startswith(_MARK):
        del held[: len(_MARK)]


def read_line(number: int, data: bytes, endpoint: str) -> BatchLine:
    """Parse a line as a request to `endpoint`. Raise LineError."""
    try:
        line = decode_json(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise LineError("invalid_json_line", "This line is not valid JSON.") from None
    if not isinstance(line, dict):
        raise LineError("invalid_json_line", "This line is not a JSON object.")
    if line.keys() - _FIELDS:
        raise LineError("unknown_parameter", "Only custom_id, method, url and body are known.")
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        raise LineError(
            "invalid_custom_id",
            f"'custom_id' must be a text of 1 to {MAX_CUSTOM_ID} characters.",
            "custom_id",
        )
    if line.get("method") != "POST":
        raise LineError("invalid_method", "'method' must be POST.", "method")
    if line.get("url") != endpoint:
        raise LineError("mismatched_endpoint", "'url' must be the endpoint of the batch.", "url")
    body = line.get("body")
    if not isinstance(body, dict):
        raise LineError("invalid_body", "'body' must be an object.", "body")
    return BatchLine(number, custom_id, body)


async def check_lines(
    lines: AsyncIterator[tuple[int, bytes | None]], endpoint: str, max_lines: int, max_values: int
) -> tuple[int, list[BatchProblem]]:
    """Return the number of requests in a file, and up to MAX_PROBLEMS problems, with which it is not run.

    Args:
        lines: of the file.
        endpoint: of the batch.
        max_lines: most requests, and most blank lines in addition.
        max_values: most strings, arrays and objects in a line.
    """
    problems: list[BatchProblem] = []
    seen: set[str] = set()
    total = blank = 0
    async for number, data in lines:
        if data == b"":
            blank += 1
            if blank > max_lines:
                problems.append(
                    BatchProblem("too_many_lines", f"A batch has at most {max_lines} blank lines.")
                )
                break
            continue
        total += 1
        if total > max_lines:
            problems.append(BatchProblem("too_many_requests", f"A batch has at most {max_lines} requests."))
            break
        try:
            line = await _checked(number, data, endpoint, max_values)
            if line.custom_id in seen:
                raise LineError("duplicate_custom_id", "This 'custom_id' was used before.", "custom_id")
            seen.add(line.custom_id)
        except LineError as error:
            problems.append(error.problem(number))
            if len(problems) >= MAX_PROBLEMS:
                break
    if not total and not problems:
        problems.append(BatchProblem("empty_file", "The file has no requests."))
    return total, problems


async def _checked(number: int, data: bytes | None, endpoint: str, max_values: int) -> BatchLine:
    if data is None:
        raise LineError("line_too_long", "This line is longer than a request's body may be.")
    if await too_many_values(data, max_values):
        raise LineError(
            "line_too_long",
            f"This line has more than the limit of {max_values} strings, arrays and objects, or of "
            f"{NUMBERS * max_values} values in all.",
        )
    return read_line(number, data, endpoint)


@dataclass(frozen=True, slots=True)
class LineResult:
    """Answer to a line: status, JSON body, and some headers. `request_id` is in the log."""

    status: int
    request_id: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return not 200 <= self.status < 300


def result_line(custom_id: str, result: LineResult, new_id: Callable[[str], str]) -> bytes:
    """Return a line of an output or error file, with its line break."""
    response = {
        "status_code": result.status,
        "request_id": result.request_id,
        "body": msgspec.Raw(result.body),
        **({"headers": result.headers} if result.headers else {}),
    }
    return _line(custom_id, response, None, new_id)


def unrun_line(custom_id: str, code: str, message: str, new_id: Callable[[str], str]) -> bytes:
    """Return a line of an error file for a request that was not run."""
    return _line(custom_id, None, {"code": code, "message": message}, new_id)


def _line(custom_id: str, response: Any, error: Any, new_id: Callable[[str], str]) -> bytes:
    fields = {"id": new_id("batch_req_"), "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(fields) + b"\n"


_BULK = 256
_UNRUN = {
    BatchStatus.EXPIRED: ("batch_expired", "The batch expired before this request was run."),
    BatchStatus.CANCELLED: ("batch_cancelled", "The batch was cancelled before this request was run."),
}

RunLine = Callable[[ClaimedBatch, BatchLine], Awaitable[LineResult]]
"""Runner of a line, however long that takes; cancelling it aborts the request."""


@dataclass(frozen=True, slots=True)
class JobLimits:
    """Limits of a batch: requests of a file, bytes of a line, strings, arrays and objects in a line, and
    lines at work or about to be."""

    max_lines: int
    max_line_bytes: int
    max_line_values: int
    most_at_work: int


class BatchJob:
    """Run of one batch that its gateway has claimed.

    A line's result is stored once, in the transaction that counts it, and only while the gateway holds the
    batch. So a gateway that takes the batch over after a crash skips exactly the lines that have results."""

    def __init__(
        self,
        claim: ClaimedBatch,
        *,
        batches: BatchStore,
        files: FileStore,
        run_line: RunLine,
        limits: JobLimits,
        clock: Callable[[], float],
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the run.

        Args:
            claim: the batch.
            batches: its store.
            files: the store of its input.
            run_line: answers a line, once there is a slot for it.
            limits: of its input.
            clock: Unix time, which is read only once: an administrator or NTP may set it.
            elapsed: seconds of a monotonic clock.
        """
        self.batch_id = claim.batch.id
        self.claim = claim
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
        """Bring the batch to its end, from any status. Raise LeaseLost, or ApiError of the store.

        After an error, and when it is cancelled, stored results stay, and the batch can be run again."""
        batch = self.claim.batch
        self.renewed(batch.status.value)
        if batch.in_progress_at is None or not self._cancelled.is_set():
            checked = await self._check_lines()
            if checked is None:
                await self._batches.finish(self.claim, BatchStatus.CANCELLED)
                return
            total, problems = checked
            if problems:
                await self._batches.finish(self.claim, BatchStatus.FAILED, problems)
                return
            await self._batches.started(self.claim, total)
        await self._run_lines()
        await self._explain_unrun()
        await self._batches.finalizing(self.claim)
        await self._batches.finish(self.claim, self._end)

    def renewed(self, status: str) -> None:
        """Take the stored status, and end the batch when it was cancelled or has expired."""
        if status == BatchStatus.CANCELLING.value:
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
        """Call `check_lines`; return None if the batch was cancelled before all lines were read."""
        limits = self._limits
        check = asyncio.create_task(
            check_lines(self._lines(), self.claim.batch.endpoint, limits.max_lines, limits.max_line_values)
        )
        await _all_unless(self._cancelled, [check])
        return None if self._cancelled.is_set() else check.result()

    def _lines(self) -> AsyncIterator[tuple[int, bytes | None]]:
        pieces = self._files.content(self.claim.batch.input_file_id)
        return split_lines(pieces, self._limits.max_line_bytes)

    async def _todo(self) -> AsyncIterator[BatchLine]:
        done = await self._batches.done(self.claim)
        async for number, data in self._lines():
            if data and number not in done:
                yield read_line(number, data, self.claim.batch.endpoint)

    async def _run_lines(self) -> None:
        todo, reading = self._todo(), asyncio.Lock()
        workers = [asyncio.create_task(self._work(todo, reading)) for _ in range(self._limits.most_at_work)]
        await _all_unless(self._stop, workers)

    async def _work(self, todo: AsyncIterator[BatchLine], reading: asyncio.Lock) -> None:
        while True:
            async with reading:
                line = await anext(todo, None)
            if line is None:
                return
            result = await self._run_line(self.claim, line)
            outcome = Outcome(line.number, result.failed, result_line(line.custom_id, result, new_id))
            await self._batches.record(self.claim, [outcome])

    async def _explain_unrun(self) -> None:
        if self._end not in _UNRUN:
            return
        code, message = _UNRUN[self._end]
        outcomes: list[Outcome] = []
        async for line in self._todo():
            outcomes.append(Outcome(line.number, True, unrun_line(line.custom_id, code, message, new_id)))
            if len(outcomes) >= _BULK:
                await self._batches.record(self.claim, outcomes)
                outcomes = []
        if outcomes:
            await self._batches.record(self.claim, outcomes)


async def _all_unless(stop: asyncio.Event, tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Wait for all tasks, until one fails or `stop` is set; cancel the rest. Raise the failure."""
    stopped = asyncio.create_task(stop.wait())
    pending: set[asyncio.Task[Any]] = set(tasks)
    try:
        while pending and not stop.is_set():
            done, pending = await asyncio.wait({stopped, *pending}, return_when=asyncio.FIRST_COMPLETED)
            pending.discard(stopped)
            for task in done:
                task.result()
    finally:
        for task in (stopped, *tasks):
            task.cancel()
        await asyncio.gather(stopped, *tasks, return_exceptions=True)
