"""Columns of a StepOutput: taken apart into rows, merged while unread, put together again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from catenary.v1 import common_pb2


class MalformedStep(Exception):
    """A StepOutput breaks the contract; the engine that sent it is given up."""


class RowLogprobs(NamedTuple):
    """Log probabilities of one row's tokens; lists grow as later steps are merged.

    sampled: one float per token; top_counts: one int per token; top_ids, top_logprobs: sum(top_counts) each.
    """

    sampled: list[float]
    top_counts: list[int]
    top_ids: list[int]
    top_logprobs: list[float]


class StepRow(NamedTuple):
    """One sequence's part of a step."""

    handle: int
    token_ids: list[int]
    logprobs: RowLogprobs | None
    end: common_pb2.SequenceEnd | None


class PendingRow:
    """What a reader has not taken yet of one sequence: later steps append, so it needs no queue."""

    __slots__ = ("end", "handle", "logprobs", "token_ids")

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.token_ids: list[int] = []
        self.logprobs: RowLogprobs | None = None
        self.end: common_pb2.SequenceEnd | None = None

    def append(self, row: StepRow) -> None:
        """Merge the tokens of a step; the end is set by the dispatcher alone."""
        self.token_ids += row.token_ids
        if row.logprobs is None:
            return
        if self.logprobs is None:
            self.logprobs = row.logprobs
            return
        self.logprobs.sampled.extend(row.logprobs.sampled)
        self.logprobs.top_counts.extend(row.logprobs.top_counts)
        self.logprobs.top_ids.extend(row.logprobs.top_ids)
        self.logprobs.top_logprobs.extend(row.logprobs.top_logprobs)

    @property
    def weight(self) -> int:
        """Size in entries, to bound a message by."""
        return 1 + len(self.token_ids) + (2 * len(self.logprobs.top_ids) if self.logprobs else 0)


def split(step: common_pb2.StepOutput) -> Iterator[StepRow]:
    """The rows of a step, in order.

    Raises:
        MalformedStep: before the first row, if the columns do not fit together.
    """
    counts = list(step.token_counts)
    token_ids = list(step.token_ids)
    if len(counts) != len(step.handles) or sum(counts) != len(token_ids):
        raise MalformedStep("token_counts do not match handles and token_ids")
    ends = {end.row: end for end in step.ends}
    if ends and max(ends) >= len(counts):
        raise MalformedStep("an end names a row that is not there")
    logprobs = _split_logprobs(step.logprobs, counts) if step.HasField("logprobs") else {}
    return _rows(list(step.handles), counts, token_ids, logprobs, ends)


def _rows(
    handles: list[int],
    counts: list[int],
    token_ids: list[int],
    logprobs: dict[int, RowLogprobs],
    ends: dict[int, common_pb2.SequenceEnd],
) -> Iterator[StepRow]:
    start = 0
    for index, handle in enumerate(handles):
        stop = start + counts[index]
        yield StepRow(handle, token_ids[start:stop], logprobs.get(index), ends.get(index))
        start = stop


def _split_logprobs(columns: common_pb2.LogprobColumns, counts: list[int]) -> dict[int, RowLogprobs]:
    sampled, top_counts = list(columns.sampled), list(columns.top_counts)
    top_ids, top_logprobs = list(columns.top_ids), list(columns.top_logprobs)
    rows = list(columns.rows)
    if any(row >= len(counts) for row in rows) or len(set(rows)) != len(rows):
        raise MalformedStep("log probabilities name a row that is not there, or one twice")
    tokens = sum(counts[row] for row in rows)
    if not tokens == len(sampled) == len(top_counts) or not sum(top_counts) == len(top_ids) == len(
        top_logprobs
    ):
        raise MalformedStep("columns of log probabilities differ in length")
    result: dict[int, RowLogprobs] = {}
    start = top_start = 0
    for row in rows:
        stop = start + counts[row]
        top_stop = top_start + sum(top_counts[start:stop])
        result[row] = RowLogprobs(
            sampled[start:stop],
            top_counts[start:stop],
            top_ids[top_start:top_stop],
            top_logprobs[top_start:top_stop],
        )
        start, top_start = stop, top_stop
    return result


def join(rows: Iterable[PendingRow]) -> common_pb2.StepOutput:
    """One StepOutput of all rows, in order."""
    handles: list[int] = []
    counts: list[int] = []
    token_ids: list[int] = []
    ends: list[common_pb2.SequenceEnd] = []
    scored: list[tuple[int, RowLogprobs]] = []
    for index, row in enumerate(rows):
        handles.append(row.handle)
        counts.append(len(row.token_ids))
        token_ids += row.token_ids
        if row.logprobs is not None:
            scored.append((index, row.logprobs))
        if row.end is not None:
            row.end.row = index
            ends.append(row.end)
    return common_pb2.StepOutput(
        handles=handles,
        token_counts=counts,
        token_ids=token_ids,
        logprobs=join_logprobs(scored) if scored else None,
        ends=ends,
    )


def join_logprobs(scored: Iterable[tuple[int, RowLogprobs]]) -> common_pb2.LogprobColumns:
    """Columns of (row index, values), row indexes rising."""
    columns = common_pb2.LogprobColumns()
    for index, values in scored:
        columns.rows.append(index)
        columns.sampled.extend(values.sampled)
        columns.top_counts.extend(values.top_counts)
        columns.top_ids.extend(values.top_ids)
        columns.top_logprobs.extend(values.top_logprobs)
    return columns
