"""Inboxes of requests: output of sequences, bounded and merged until it is read, one wake-up for all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

from catenary.columns import LogprobValues, split
from catenary.v1 import common_pb2
from gateway.errors import ApiError, from_wire, internal, unavailable
from gateway.streaming.delta import TokenLogprob

TAKE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class FoundBeam:
    """Hypothesis of a beam search: its tokens, their log probabilities if requested, its end."""

    ids: list[int]
    logprobs: list[TokenLogprob] | None
    reason: common_pb2.FinishReason.ValueType
    stop_token: int | None


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    """End of a sequence. `error` is set instead of a good end.

    `stop_token`: the token that ended it; `beams`: of a beam search, best first; `vector`: little-endian
    float32 of a pooled text, else empty."""

    reason: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_UNSPECIFIED
    stop_token: int | None = None
    cached_tokens: int = 0
    error: ApiError | None = None
    beams: tuple[FoundBeam, ...] = ()
    vector: bytes = b""


class Batch(NamedTuple):
    """Unread output of one sequence. `prompt`: log probabilities of further tokens of its prompt."""

    ids: list[int]
    logprobs: list[TokenLogprob] | None
    end: SequenceEnded | None
    prompt: list[TokenLogprob]


class SequenceFeed:
    """Unread output of one sequence. The session writes, the request reads; steps of a slow reader merge."""

    __slots__ = ("_end", "_ids", "_inbox", "_logprobs", "_prompt", "index")

    def __init__(self, inbox: Inbox, index: int) -> None:
        self._inbox = inbox
        self.index = index
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt: list[TokenLogprob] = []
        self._end: SequenceEnded | None = None

    def extend(
        self, ids: list[int], logprobs: list[TokenLogprob], prompt: Sequence[TokenLogprob] = ()
    ) -> bool:
        """Add a step's tokens, and log probabilities of prompt tokens. Return False if the reader is too far
        behind: the sequence should be aborted."""
        if len(self._ids) + len(ids) > self._inbox.max_tokens:
            return False
        self._ids += ids
        self._logprobs += logprobs
        if prompt:
            self._prompt += prompt
        self._inbox.mark(self)
        return True

    def finish(self, end: SequenceEnded) -> None:
        """Note the end of the sequence; only the first one counts."""
        if self._end is None:
            self._end = end
            self._inbox.mark(self)

    def take(self) -> Batch:
        """Take unread output, up to TAKE_TOKENS: a reader far behind must not block the loop for others."""
        prompt, self._prompt = self._prompt, []
        if len(self._ids) <= TAKE_TOKENS:
            ids, logprobs = self._ids, self._logprobs
            self._ids, self._logprobs = [], []
            return Batch(ids, logprobs or None, self._end, prompt)
        ids, logprobs = self._ids[:TAKE_TOKENS], self._logprobs[:TAKE_TOKENS]
        del self._ids[:TAKE_TOKENS], self._logprobs[:TAKE_TOKENS]
        self._inbox.mark(self)
        return Batch(ids, logprobs or None, None, prompt)


class Inbox:
    """Feeds of one request."""

    def __init__(self, max_tokens: int) -> None:
        """Make an inbox. `max_tokens`: most unread tokens of a sequence."""
        self.max_tokens = max_tokens
        self._ready: dict[int, SequenceFeed] = {}
        # There is one wake-up for each token, and an Event would double its cost.
        self._waiter: asyncio.Future[None] | None = None
        self._interrupt: Exception | None = None

    def feed(self, index: int) -> SequenceFeed:
        return SequenceFeed(self, index)

    def mark(self, feed: SequenceFeed) -> None:
        self._ready[feed.index] = feed
        self._wake()

    def interrupt(self, error: Exception) -> None:
        """Make this and every later `wait` raise `error`."""
        self._interrupt = self._interrupt or error
        self._wake()

    async def wait(self) -> list[SequenceFeed]:
        """Wait until something is unread, and return the feeds that have it, by index."""
        if self._ready or self._interrupt is not None:
            # A backlog: reading it without a pause would block the loop.
            await asyncio.sleep(0)
        else:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._interrupt is not None:
            raise self._interrupt
        ready = [self._ready[index] for index in sorted(self._ready)]
        self._ready.clear()
        return ready

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Reader(Protocol):
    """Receiver of a sequence's output."""

    def extend(
        self, ids: list[int], logprobs: list[TokenLogprob], prompt: Sequence[TokenLogprob] = ()
    ) -> bool:
        """See `SequenceFeed.extend`."""


def deliver(
    step: common_pb2.StepOutput, lookup: Callable[[int], Reader | None]
) -> Iterator[tuple[int, common_pb2.SequenceEnd | None]]:
    """Give each row to its reader. Skip rows of unknown handles: their abort is on its way.

    Yield (handle, end) for each sequence that is over: its end, or None if its reader is too far behind.
    Raise MalformedStep before anything was delivered.
    """
    for row in split(step):
        reader = lookup(row.handle)
        if reader is None:
            continue
        logprobs = [] if row.logprobs is None else _logprobs(row.logprobs)
        prompt = () if row.prompt_logprobs is None else _logprobs(row.prompt_logprobs)
        # An end without tokens is not delivered as output: once an answer's stream has begun, an error can
        # no longer be its HTTP status.
        if (row.token_ids or prompt) and not reader.extend(row.token_ids, logprobs, prompt):
            yield row.handle, None
        elif row.end is not None:
            yield row.handle, row.end


def ended(end: common_pb2.SequenceEnd) -> SequenceEnded:
    cached = end.usage.cached_tokens
    if end.reason == common_pb2.FINISH_REASON_STOP:
        stop_token = end.stop_token_id if end.HasField("stop_token_id") else None
        return SequenceEnded(end.reason, stop_token, cached, None, _beams(end), end.vector)
    if end.reason == common_pb2.FINISH_REASON_LENGTH:
        return SequenceEnded(end.reason, None, cached, None, _beams(end))
    if end.reason == common_pb2.FINISH_REASON_ABORT:
        # A sequence that this gateway aborts has no reader any more: the server decided this one.
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


class Session(Protocol):
    """Session that brings each sequence to its end, despite losses of engines and routers; it never waits."""

    def check(self, model: str, priority_class: common_pb2.PriorityClass.ValueType, tenant: str) -> None:
        """Raise ApiError if such a sequence would be refused now: asking first saves the rendering."""

    def submit(
        self, spec: common_pb2.SequenceSpec, feed: SequenceFeed, same_prompt_as: int | None = None
    ) -> int:
        """Submit a sequence, whose output goes to `feed`. Return its handle. Raise ApiError.

        `spec` is kept. `same_prompt_as` is the handle of another sequence with the same prompt; the token ids
        are then taken out of `spec`.
        """

    def abort(self, handle: int) -> None:
        """Abort a sequence. Idempotent."""
