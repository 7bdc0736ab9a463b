"""Rows of engine steps on their way to a router: merged for a slow reader, built into a StepOutput."""

from __future__ import annotations

from collections.abc import Iterator

from catenary.columns import StepRow, split_columns, take_message
from catenary.v1 import common_pb2
from services.engine.domain import CoreErrorCode, FinishReason
from services.engine.link import EndRow, StepColumns
from services.engine.servicer.beams import hypothesis_of
from services.engine.servicer.offers import offer_message

_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
}


def rows_of(columns: StepColumns) -> Iterator[StepRow]:
    """The rows of a core's step; their handles are the core's keys."""
    ends = {end.row: _end_of(end) for end in columns.ends}
    return split_columns(
        columns.keys,
        columns.token_counts,
        columns.token_ids,
        columns.logprob_rows,
        columns,
        ends,
        columns.prompts,
    )


def _end_of(end: EndRow) -> common_pb2.SequenceEnd:
    message = common_pb2.SequenceEnd(
        reason=_REASONS[end.reason],
        usage=common_pb2.Usage(
            prompt_tokens=end.prompt_tokens,
            cached_tokens=end.cached_tokens,
            completion_tokens=end.completion_tokens,
            transferred_tokens=end.transferred_tokens,
        ),
        stop_token_id=end.stop_token_id,
        vector=end.vector,
        hypotheses=map(hypothesis_of, end.hypotheses),
        kv_offer=None if end.kv_offer is None else offer_message(end.kv_offer),
    )
    if message.reason == common_pb2.FINISH_REASON_ERROR:
        code = end.error_code or CoreErrorCode.INTERNAL
        message.error.code = common_pb2.ErrorCode.Value(f"ERROR_CODE_{code}")
        message.error.message = end.error_message or "The engine failed this sequence."
        if end.error_param is not None:
            message.error.param = end.error_param
        message.error.retryable = code in (CoreErrorCode.OVERLOADED, CoreErrorCode.INTERNAL)
    return message


class StepBuffer:
    """Rows that a router has not been sent yet. Rows of later steps merge into those of earlier ones. What is
    the first of its sequence goes before the others, in a message of its own: somebody waits for it, and all
    rows of a step take longer than one.

    Its size is bounded by the tokens of the sequences that are live: a row ends its sequence at the latest at
    the model's context.
    """

    def __init__(self) -> None:
        self._rows: dict[int, StepRow] = {}
        self._first_rows: dict[int, StepRow] = {}

    def __bool__(self) -> bool:
        return bool(self._rows or self._first_rows)

    @property
    def has_first(self) -> bool:
        """Whether the next message is one of first rows."""
        return bool(self._first_rows)

    def add(self, row: StepRow, *, first: bool = False) -> None:
        """Append news of the handle that the row names. `first`: nothing of it was added before."""
        held = self._first_rows.get(row.handle) or self._rows.get(row.handle)
        if held is not None:
            held.append(row)
            held.end = row.end or held.end
        elif first:
            self._first_rows[row.handle] = row
        else:
            self._rows[row.handle] = row

    def take(self) -> common_pb2.StepOutput:
        """The next message: all rows of one kind, or as many as one of moderate size holds."""
        return take_message(self._first_rows or self._rows)
