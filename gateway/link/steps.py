"""From a step's columns to those who read its sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Protocol

from catenary.columns import LogprobValues, split
from catenary.v1 import common_pb2
from gateway.errors import from_wire, internal, unavailable
from gateway.link.inbox import FoundBeam, SequenceEnded
from gateway.streaming.entries import TokenLogprob


class Reader(Protocol):
    """Takes the output of a sequence."""

    def extend(
        self, ids: list[int], logprobs: list[TokenLogprob], prompt: Sequence[TokenLogprob] = ()
    ) -> bool:
        """Add a step's tokens, and log probabilities of tokens of the prompt. False: the reader is too far
        behind and the sequence should be given up."""


def deliver(
    step: common_pb2.StepOutput, lookup: Callable[[int], Reader | None]
) -> Iterator[tuple[int, common_pb2.SequenceEnd | None]]:
    """Give each row to its reader. Rows of unknown handles are passed over: their abort is on its way.

    Yields (handle, end) for each sequence that is over: how it ended, or None if its reader is too far
    behind. Raises MalformedStep before anything was delivered.
    """
    for row in split(step):
        reader = lookup(row.handle)
        if reader is None:
            continue
        logprobs = [] if row.logprobs is None else _logprobs(row.logprobs)
        prompt = () if row.prompt_logprobs is None else _logprobs(row.prompt_logprobs)
        # An end alone is no answer yet: a stream that has begun can have no HTTP status for what follows.
        if (row.token_ids or prompt) and not reader.extend(row.token_ids, logprobs, prompt):
            yield row.handle, None
        elif row.end is not None:
            yield row.handle, row.end


def ended(end: common_pb2.SequenceEnd) -> SequenceEnded:
    """An end as the request sees it."""
    cached = end.usage.cached_tokens
    if end.reason == common_pb2.FINISH_REASON_STOP:
        stop_token = end.stop_token_id if end.HasField("stop_token_id") else None
        return SequenceEnded(end.reason, stop_token, cached, None, _beams(end), end.vector)
    if end.reason == common_pb2.FINISH_REASON_LENGTH:
        return SequenceEnded(end.reason, None, cached, None, _beams(end))
    if end.reason == common_pb2.FINISH_REASON_ABORT:
        # Aborts of our own are no longer looked up: this one was decided elsewhere.
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
