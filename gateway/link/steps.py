"""From a step's columns to the feeds of its sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from catenary.v1 import common_pb2
from gateway.errors import from_wire, internal, unavailable
from gateway.link.inbox import SequenceEnded, SequenceFeed
from gateway.streaming.sequence_text import TokenLogprob

Lookup = Callable[[int], SequenceFeed | None]


class MalformedStep(Exception):
    """The columns of a step do not fit together."""


def deliver(step: common_pb2.StepOutput, lookup: Lookup) -> Iterator[tuple[int, bool]]:
    """Give each row to its feed; rows of unknown handles (aborted here, still on their way there) are
    passed over.

    Yields (handle, overrun) for each sequence that is over: it ended, or its reader is too far behind.
    Raises MalformedStep before anything was delivered.
    """
    rows = _rows(step)
    ends = {end.row: end for end in step.ends}
    for row, (handle, ids, logprobs) in enumerate(rows):
        feed = lookup(handle)
        if feed is None:
            continue
        if not feed.extend(ids, logprobs):
            yield handle, True
            continue
        end = ends.get(row)
        if end is not None:
            feed.finish(ended(end))
            yield handle, False


def ended(end: common_pb2.SequenceEnd) -> SequenceEnded:
    """An end as the request sees it."""
    cached = end.usage.cached_tokens
    if end.reason == common_pb2.FINISH_REASON_STOP:
        return SequenceEnded(end.reason, end.HasField("stop_token_id"), cached)
    if end.reason == common_pb2.FINISH_REASON_LENGTH:
        return SequenceEnded(end.reason, False, cached)
    if end.reason == common_pb2.FINISH_REASON_ABORT:
        # Aborts of our own are no longer looked up: this one was somebody else's.
        return SequenceEnded(end.reason, error=unavailable("The request was aborted by the server."))
    return SequenceEnded(end.reason, error=from_wire(end.error) if end.HasField("error") else internal())


def _rows(step: common_pb2.StepOutput) -> list[tuple[int, list[int], list[TokenLogprob]]]:
    counts, ids = step.token_counts, step.token_ids
    if len(counts) != len(step.handles) or sum(counts) != len(ids):
        raise MalformedStep
    logprobs = _logprobs(step) if step.HasField("logprobs") else {}
    rows = []
    start = 0
    for row, (handle, count) in enumerate(zip(step.handles, counts, strict=True)):
        rows.append((handle, list(ids[start : start + count]), logprobs.get(row, [])))
        start += count
    return rows


def _logprobs(step: common_pb2.StepOutput) -> dict[int, list[TokenLogprob]]:
    columns = step.logprobs
    token = alternative = 0
    found: dict[int, list[TokenLogprob]] = {}
    try:
        for row in columns.rows:
            values = []
            for _ in range(step.token_counts[row]):
                end = alternative + columns.top_counts[token]
                ids = tuple(columns.top_ids[alternative:end])
                tops = tuple(columns.top_logprobs[alternative:end])
                values.append(TokenLogprob(columns.sampled[token], ids, tops))
                token += 1
                alternative = end
            found[row] = values
    except IndexError:
        raise MalformedStep from None
    return found
