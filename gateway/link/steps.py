"""From a step's columns to the feeds of its sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from catenary.columns import LogprobValues, split
from catenary.v1 import common_pb2
from gateway.errors import from_wire, internal, unavailable
from gateway.link.inbox import FoundBeam, SequenceEnded, SequenceFeed
from gateway.streaming.entries import TokenLogprob

Lookup = Callable[[int], SequenceFeed | None]


def deliver(step: common_pb2.StepOutput, lookup: Lookup) -> Iterator[tuple[int, bool]]:
    """Give each row to its feed. Rows of unknown handles are passed over: their abort is on its way.

    Yields (handle, overrun) for each sequence that is over: it ended, or its reader is too far behind.
    Raises MalformedStep before anything was delivered.
    """
    for row in split(step):
        feed = lookup(row.handle)
        if feed is None:
            continue
        logprobs = [] if row.logprobs is None else _logprobs(row.logprobs)
        prompt = () if row.prompt_logprobs is None else _logprobs(row.prompt_logprobs)
        if not feed.extend(row.token_ids, logprobs, prompt):
            yield row.handle, True
        elif row.end is not None:
            feed.finish(ended(row.end))
            yield row.handle, False


def ended(end: common_pb2.SequenceEnd) -> SequenceEnded:
    """An end as the request sees it."""
    cached = end.usage.cached_tokens
    if end.reason == common_pb2.FINISH_REASON_STOP:
        stop_token = end.stop_token_id if end.HasField("stop_token_id") else None
        return SequenceEnded(end.reason, stop_token, cached, None, _beams(end), end.vector)
    if end.reason == common_pb2.FINISH_REASON_LENGTH:
        return SequenceEnded(end.reason, None, cached, None, _beams(end))
    if end.reason == common_pb2.FINISH_REASON_ABORT:
        # Aborts of our own are no longer looked up: this one was somebody else's.
        return SequenceEnded(end.reason, error=unavailable("The request was aborted by the server."))
    return SequenceEnded(end.reason, error=from_wire(end.error) if end.HasField("error") else internal())


def _beams(end: common_pb2.SequenceEnd) -> tuple[FoundBeam, ...]:
    return tuple(
        FoundBeam(
            list(found.token_ids),
            _logprobs(found.logprobs) if found.HasField("logprobs") else None,
            found.reason,
            found.stop_token_id if found.HasField("stop_token_id") else None,
        )
        for found in end.hypotheses
    )


def _logprobs(values: LogprobValues) -> list[TokenLogprob]:
    ids, tops = iter(values.top_ids), iter(values.top_logprobs)
    return [
        TokenLogprob(sampled, tuple(islice(ids, count)), tuple(islice(tops, count)))
        for sampled, count in zip(values.sampled, values.top_counts, strict=True)
    ]
