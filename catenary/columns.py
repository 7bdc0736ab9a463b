"""Rows of a StepOutput: taken apart, merged while unread, put together again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from catenary.v1 import common_pb2

# Entries (tokens and alternatives) of one message: keeps a message that was merged for long below a few MiB.
MAX_STEP_WEIGHT = 262_144


class MalformedStep(Exception):
    """The columns of a step do not fit together: its sender breaks the contract."""


@dataclass(slots=True)
class RowLogprobs:
    """Log probabilities of one row's new tokens, or of its prompt's; lists grow as later steps are merged.

    sampled: one float per token; top_counts: one int per token; top_ids, top_logprobs: sum(top_counts) each.
    """

    sampled: list[float]
    top_counts: list[int]
    top_ids: list[int]
    top_logprobs: list[float]

    def extend(self, later: RowLogprobs) -> None:
        """Append the values of the tokens that follow."""
        self.sampled += later.sampled
        self.top_counts += later.top_counts
        self.top_ids += later.top_ids
        self.top_logprobs += later.top_logprobs

    def without_first(self, count: int) -> RowLogprobs | None:
        """Return the values of all tokens but the first `count`; None if there is none left."""
        if count >= len(self.sampled):
            return None
        tops = sum(self.top_counts[:count])
        return RowLogprobs(
            self.sampled[count:], self.top_counts[count:], self.top_ids[tops:], self.top_logprobs[tops:]
        )


class Alternatives(Protocol):
    """The columns of the best alternatives of each token."""

    @property
    def top_counts(self) -> Sequence[int]:
        """One count per token."""

    @property
    def top_ids(self) -> Sequence[int]:
        """As many ids per token as its count says."""

    @property
    def top_logprobs(self) -> Sequence[float]:
        """One value for each of `top_ids`."""


class LogprobValues(Alternatives, Protocol):
    """The columns that RowLogprobs, LogprobColumns and the engine core's step have in common."""

    @property
    def sampled(self) -> Sequence[float]:
        """One value per token."""


class PromptValues(Alternatives, Protocol):
    """The columns that PromptLogprobColumns and the engine core's step have in common."""

    @property
    def rows(self) -> Sequence[int]:
        """The rows that have log probabilities of their prompt."""

    @property
    def counts(self) -> Sequence[int]:
        """Prompt tokens of each of `rows`."""

    @property
    def logprobs(self) -> Sequence[float]:
        """One value per token."""


@dataclass(slots=True)
class StepRow:
    """News of one sequence: of a step, or of all the steps that its reader has not taken yet."""

    handle: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: RowLogprobs | None = None
    end: common_pb2.SequenceEnd | None = None
    prompt_logprobs: RowLogprobs | None = None

    def append(self, later: StepRow) -> None:
        """Merge the tokens of a later step. The caller sets the end: it may have another one to report."""
        self.token_ids += later.token_ids
        self.logprobs = _merged(self.logprobs, later.logprobs)
        self.prompt_logprobs = _merged(self.prompt_logprobs, later.prompt_logprobs)

    @property
    def weight(self) -> int:
        """Size in entries, to bound a message by."""
        weight = 1 + len(self.token_ids)
        if self.logprobs is not None:
            weight += 2 * len(self.logprobs.top_ids)
        if self.prompt_logprobs is not None:
            weight += 2 * (len(self.prompt_logprobs.sampled) + len(self.prompt_logprobs.top_ids))
        if self.end is not None:
            found = self.end.hypotheses
            weight += sum(len(one.token_ids) + 2 * len(one.logprobs.top_ids) for one in found)
        if self.end is not None:
            weight += len(self.end.vector) // 4
        return weight


def _merged(held: RowLogprobs | None, later: RowLogprobs | None) -> RowLogprobs | None:
    if held is None or later is None:
        return held or later
    held.extend(later)
    return held


def split(step: common_pb2.StepOutput) -> Iterator[StepRow]:
    """Yield the rows of a step, in order.

    Raises:
        MalformedStep: before the first row, if the columns do not fit together.
    """
    ends = {end.row: end for end in step.ends}
    if len(ends) != len(step.ends):
        raise MalformedStep("a row ends twice")
    if len(set(step.handles)) != len(step.handles):
        raise MalformedStep("a handle has two rows")
    prompts = step.prompt_logprobs if step.HasField("prompt_logprobs") else None
    return split_columns(
        step.handles, step.token_counts, step.token_ids, step.logprobs.rows, step.logprobs, ends, prompts
    )


def split_columns(
    handles: Sequence[int],
    counts: Sequence[int],
    token_ids: Sequence[int],
    scored: Sequence[int],
    values: LogprobValues,
    ends: Mapping[int, common_pb2.SequenceEnd],
    prompts: PromptValues | None = None,
) -> Iterator[StepRow]:
    """Split columns of any form, as `split`: `values` belong to the rows `scored`, `ends` stand by row."""
    if len(counts) != len(handles) or sum(counts) != len(token_ids):
        raise MalformedStep("token_counts do not match handles and token_ids")
    if ends and max(ends) >= len(counts):
        raise MalformedStep("an end names a row that is not there")
    _check_rows(scored, len(counts))
    logprobs = _split_logprobs(scored, [counts[row] for row in scored], list(values.sampled), values)
    asked = _split_prompts(prompts, len(counts)) if prompts is not None else {}
    return _rows(list(handles), list(counts), list(token_ids), logprobs, asked, ends)


def _rows(
    handles: list[int],
    counts: list[int],
    token_ids: list[int],
    logprobs: dict[int, RowLogprobs],
    prompts: dict[int, RowLogprobs],
    ends: Mapping[int, common_pb2.SequenceEnd],
) -> Iterator[StepRow]:
    start = 0
    for index, handle in enumerate(handles):
        stop = start + counts[index]
        yield StepRow(handle, token_ids[start:stop], logprobs.get(index), ends.get(index), prompts.get(index))
        start = stop


def _check_rows(rows: Sequence[int], count: int) -> None:
    if any(row >= count for row in rows) or len(set(rows)) != len(rows):
        raise MalformedStep("log probabilities name a row that is not there, or one twice")


def _split_prompts(values: PromptValues, count: int) -> dict[int, RowLogprobs]:
    rows, counts = list(values.rows), list(values.counts)
    _check_rows(rows, count)
    if len(rows) != len(counts) or not all(counts):
        raise MalformedStep("log probabilities of prompts do not say of how many tokens")
    return _split_logprobs(rows, counts, list(values.logprobs), values)


def _split_logprobs(
    rows: Sequence[int], counts: Sequence[int], sampled: list[float], values: Alternatives
) -> dict[int, RowLogprobs]:
    """Return log probabilities by row; counts has the tokens of each of `rows`."""
    top_counts = list(values.top_counts)
    top_ids, top_logprobs = list(values.top_ids), list(values.top_logprobs)
    tokens, tops = sum(counts), sum(top_counts)
    if not tokens == len(sampled) == len(top_counts) or not tops == len(top_ids) == len(top_logprobs):
        raise MalformedStep("columns of log probabilities differ in length")
    result: dict[int, RowLogprobs] = {}
    start = top_start = 0
    for row, count in zip(rows, counts, strict=True):
        stop = start + count
        top_stop = top_start + sum(top_counts[start:stop])
        result[row] = RowLogprobs(
            sampled[start:stop],
            top_counts[start:stop],
            top_ids[top_start:top_stop],
            top_logprobs[top_start:top_stop],
        )
        start, top_start = stop, top_stop
    return result


def take_message(rows: dict[int, StepRow]) -> common_pb2.StepOutput:
    """Return the first of the waiting rows, by handle, that make a message of moderate size; they wait no
    more."""
    taken: list[StepRow] = []
    weight = 0
    for row in rows.values():
        weight += row.weight
        if taken and weight > MAX_STEP_WEIGHT:
            break
        taken.append(row)
    for row in taken:
        del rows[row.handle]
    return join(taken)


def join(rows: Iterable[StepRow]) -> common_pb2.StepOutput:
    """Return one StepOutput of all rows, in order."""
    handles: list[int] = []
    counts: list[int] = []
    token_ids: list[int] = []
    ends: list[common_pb2.SequenceEnd] = []
    scored: list[tuple[int, RowLogprobs]] = []
    asked: list[tuple[int, RowLogprobs]] = []
    for index, row in enumerate(rows):
        handles.append(row.handle)
        counts.append(len(row.token_ids))
        token_ids += row.token_ids
        if row.logprobs is not None:
            scored.append((index, row.logprobs))
        if row.prompt_logprobs is not None:
            asked.append((index, row.prompt_logprobs))
        if row.end is not None:
            row.end.row = index
            ends.append(row.end)
    return common_pb2.StepOutput(
        handles=handles,
        token_counts=counts,
        token_ids=token_ids,
        logprobs=join_logprobs(scored) if scored else None,
        ends=ends,
        prompt_logprobs=join_prompt_logprobs(asked) if asked else None,
    )


def join_logprobs(scored: Iterable[tuple[int, RowLogprobs]]) -> common_pb2.LogprobColumns:
    """Return columns of (row index, values), row indexes rising."""
    columns = common_pb2.LogprobColumns()
    for index, values in scored:
        columns.rows.append(index)
        columns.sampled.extend(values.sampled)
        columns.top_counts.extend(values.top_counts)
        columns.top_ids.extend(values.top_ids)
        columns.top_logprobs.extend(values.top_logprobs)
    return columns


def join_prompt_logprobs(asked: Iterable[tuple[int, RowLogprobs]]) -> common_pb2.PromptLogprobColumns:
    """Return columns of (row index, values of prompt tokens), row indexes rising."""
    columns = common_pb2.PromptLogprobColumns()
    for index, values in asked:
        columns.rows.append(index)
        columns.counts.append(len(values.sampled))
        columns.logprobs.extend(values.sampled)
        columns.top_counts.extend(values.top_counts)
        columns.top_ids.extend(values.top_ids)
        columns.top_logprobs.extend(values.top_logprobs)
    return columns
