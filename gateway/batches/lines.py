"""Lines of a batch's files: requests in, answers and errors out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.batches.objects import BatchProblem
from gateway.http.body import NUMBERS, decode_json, too_many_values
from gateway.turns import Turns

# Of names that the answers repeat (OpenAI has no figure), and faults that one report names.
MAX_CUSTOM_ID = 512
MAX_PROBLEMS = 100
# Windows' tools put it in front of a text in UTF-8.
_MARK = b"\xef\xbb\xbf"
_FIELDS = frozenset({"custom_id", "method", "url", "body"})


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A request of a batch. `number` counts the lines of the file from 1."""

    number: int
    custom_id: str
    body: dict[str, Any]


class LineError(ValueError):
    """A line that is no request."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param

    def problem(self, line: int) -> BatchProblem:
        """It, as the batch shows it."""
        return BatchProblem(self.code, self.message, line, self.param)


async def split_lines(
    pieces: AsyncIterator[bytes], max_bytes: int
) -> AsyncIterator[tuple[int, bytes | None]]:
    """Lines with their numbers, however the file was cut into pieces; others have the loop now and then.

    A blank line is empty. One of more than `max_bytes` is None; no more than about that much is ever held. A
    byte order mark in front of the first is left out."""
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
    """A line as a request to `endpoint`. Raises LineError."""
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
    """The number of requests in a file, and what keeps it from being run (the first hundred things).

    Args:
        lines: of the file.
        endpoint: of the batch.
        max_lines: most requests, and most blank lines beside them.
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
    """The answer to a line: a status, a JSON body, and headers that say more. `request_id` is in the log."""

    status: int
    request_id: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether it belongs into the error file."""
        return not 200 <= self.status < 300


def result_line(custom_id: str, result: LineResult, new_id: Callable[[str], str]) -> bytes:
    """A line of an output or error file, with its line break."""
    response = {
        "status_code": result.status,
        "request_id": result.request_id,
        "body": msgspec.Raw(result.body),
        **({"headers": result.headers} if result.headers else {}),
    }
    return _line(custom_id, response, None, new_id)


def unrun_line(custom_id: str, code: str, message: str, new_id: Callable[[str], str]) -> bytes:
    """A line of an error file for a request that was not run."""
    return _line(custom_id, None, {"code": code, "message": message}, new_id)


def _line(custom_id: str, response: Any, error: Any, new_id: Callable[[str], str]) -> bytes:
    fields = {"id": new_id("batch_req_"), "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(fields) + b"\n"
