"""Rows of engine steps on their way to a router: split, merged for a slow reader, built into a StepOutput."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from catenary.v1 import common_pb2
from services.engine.link import CoreErrorCode, EndRow, FinishReason, StepColumns

_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
}


@dataclass(slots=True)
class RowLogprobs:
    """Log probability columns of one row's tokens."""

    sampled: list[float] = field(default_factory=list)
    top_counts: list[int] = field(default_factory=list)
    top_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)

    def extend(self, other: RowLogprobs) -> None:
        """Append the columns of the tokens that follow."""
        self.sampled += other.sampled
        self.top_counts += other.top_counts
        self.top_ids += other.top_ids
        self.top_logprobs += other.top_logprobs


@dataclass(slots=True)
class Row:
    """News of one sequence."""

    token_ids: list[int]
    logprobs: RowLogprobs | None = None
    end: common_pb2.SequenceEnd | None = None


def rows_of(columns: StepColumns) -> Iterator[tuple[int, Row]]:
    """The rows of a core's step as (key, row)."""
    ends = {end.row: end for end in columns.ends}
    logged = set(columns.logprob_rows)
    token = sampled = top = 0
    for index, (key, count) in enumerate(zip(columns.keys, columns.token_counts, strict=True)):
        row = Row(columns.token_ids[token : token + count])
        token += count
        if index in logged:
            counts = columns.top_counts[sampled : sampled + count]
            width = sum(counts)
            row.logprobs = RowLogprobs(
                columns.sampled[sampled : sampled + count],
                counts,
                columns.top_ids[top : top + width],
                columns.top_logprobs[top : top + width],
            )
            sampled += count
            top += width
        if index in ends:
            row.end = _end_of(ends[index])
        yield key, row


def _end_of(end: EndRow) -> common_pb2.SequenceEnd:
    message = common_pb2.SequenceEnd(
        reason=_REASONS[end.reason],
        usage=common_pb2.Usage(
            prompt_tokens=end.prompt_tokens,
            cached_tokens=end.cached_tokens,
            completion_tokens=end.completion_tokens,
        ),
        stop_token_id=end.stop_token_id,
    )
    if message.reason == common_pb2.FINISH_REASON_ERROR:
        code = end.error_code or CoreErrorCode.INTERNAL
        message.error.code = common_pb2.ErrorCode.Value(f"ERROR_CODE_{code}")
        message.error.message = end.error_message or "The engine failed this sequence."
        message.error.retryable = code in (CoreErrorCode.OVERLOADED, CoreErrorCode.INTERNAL)
    return message


class StepBuffer:
    """Rows that a router has not been sent yet. Rows of later steps merge into those of earlier ones.

    Its size is bounded by the tokens of the sequences that are live: a row ends its sequence at the latest at
    the model's context.
    """

    def __init__(self) -> None:
        self._rows: dict[int, Row] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, handle: int, row: Row) -> None:
        """Append news of a handle."""
        held = self._rows.get(handle)
        if held is None:
            self._rows[handle] = row
            return
        held.token_ids += row.token_ids
        if row.logprobs is not None:
            held.logprobs = held.logprobs or RowLogprobs()
            held.logprobs.extend(row.logprobs)
        held.end = row.end or held.end

    def take(self) -> common_pb2.StepOutput:
        """All rows as one message; the buffer is empty after."""
        rows, self._rows = self._rows, {}
        output = common_pb2.StepOutput()
        for index, (handle, row) in enumerate(rows.items()):
            output.handles.append(handle)
            output.token_counts.append(len(row.token_ids))
            output.token_ids.extend(row.token_ids)
            if row.logprobs is not None:
                output.logprobs.rows.append(index)
                output.logprobs.sampled.extend(row.logprobs.sampled)
                output.logprobs.top_counts.extend(row.logprobs.top_counts)
                output.logprobs.top_ids.extend(row.logprobs.top_ids)
                output.logprobs.top_logprobs.extend(row.logprobs.top_logprobs)
            if row.end is not None:
                row.end.row = index
                output.ends.append(row.end)
        return output
