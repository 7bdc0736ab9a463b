"""A running request: its sequences on the session, and their output as deltas of choices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from catenary.v1 import common_pb2
from gateway.errors import internal, timed_out
from gateway.generation.plan import GenerationPlan
from gateway.link import Inbox, RouterSession, SequenceEnded, SequenceFeed
from gateway.streaming.delta import ChoiceDelta
from gateway.streaming.sequence_text import SequenceText
from gateway.streaming.usage import Usage, usage_of

_REASONS: dict[int, str] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}


class _Choice:
    __slots__ = ("cached_tokens", "finish_reason", "handle", "text")

    def __init__(self, handle: int, text: SequenceText) -> None:
        self.handle = handle
        self.text = text
        self.finish_reason: str | None = None
        self.cached_tokens: int | None = None


class Generation:
    """Use as an async context manager: leaving it aborts what has not ended, whatever the reason.

    `start` submits and waits for the engine's first answer, `next` yields that and then waits for more
    output until all is `done`; an error of one sequence is an error of the request.
    """

    def __init__(
        self,
        plan: GenerationPlan,
        session: RouterSession,
        *,
        max_unread_tokens: int,
        deadline: float,
        on_tokens: Callable[[int, int], None],
    ) -> None:
        """Nothing is sent before `start`.

        Args:
            plan: what to generate.
            session: the stream to the router.
            max_unread_tokens: how far a sequence's reader may be behind.
            deadline: the loop's time at which the request is given up.
            on_tokens: called with each choice's index and its number of new tokens.
        """
        self.plan = plan
        self._session = session
        self._deadline = deadline
        self._on_tokens = on_tokens
        self._inbox = Inbox(max_unread_tokens)
        self._choices: list[_Choice] = []
        self._open = plan.count
        self._first: list[ChoiceDelta] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for choice in self._choices:
            if choice.finish_reason is None:
                self._session.abort(choice.handle)

    @property
    def done(self) -> bool:
        """Whether every choice has ended and `next` has told of it."""
        return self._open == 0 and self._first is None

    @property
    def finish_reasons(self) -> list[str | None]:
        """Of each choice, None while it goes on."""
        return [choice.finish_reason for choice in self._choices]

    def interrupt(self, error: Exception) -> None:
        """Make `next` raise."""
        self._inbox.interrupt(error)

    async def start(self, traceparent: str | None) -> None:
        """Send all sequences to the router, and wait until an engine has answered for the first time: what
        can be refused has been then.

        Raises ApiError, or the error of `interrupt`; what was sent before it is aborted on exit.
        """
        self._submit(traceparent)
        self._first = await self._wait()

    def _submit(self, traceparent: str | None) -> None:
        stops, min_tokens = self.plan.fields.stops, self.plan.fields.min_tokens or 0
        for index, spec in enumerate(self.plan.specs(traceparent)):
            sample = index % self.plan.n
            first = self._choices[index - sample].handle if sample else None
            handle = self._session.submit(spec, self._inbox.feed(index), first)
            prompt = self.plan.prompts[index // self.plan.n]
            detokenizer = self.plan.model.vocabulary.detokenizer(prompt)
            self._choices.append(_Choice(handle, SequenceText(detokenizer, stops, min_tokens)))

    async def next(self) -> list[ChoiceDelta]:
        """The next output, maybe without text. Raises ApiError, or the error of `interrupt`."""
        if (first := self._first) is not None:
            self._first = None
            return first
        return await self._wait()

    async def _wait(self) -> list[ChoiceDelta]:
        try:
            async with asyncio.timeout_at(self._deadline):
                feeds = await self._inbox.wait()
        except TimeoutError:
            raise timed_out("The request took longer than the server allows.") from None
        return [self._read(feed) for feed in feeds if self._choices[feed.index].finish_reason is None]

    def usage(self) -> Usage:
        """Counts up to now; cached tokens only once they are known of every prompt."""
        completion = sum(choice.text.tokens for choice in self._choices)
        cached = [self._choices[index * self.plan.n].cached_tokens for index in range(len(self.plan.prompts))]
        known = [count for count in cached if count is not None]
        return usage_of(
            self.plan.prompt_tokens, completion, sum(known) if len(known) == len(cached) else None
        )

    def _read(self, feed: SequenceFeed) -> ChoiceDelta:
        choice = self._choices[feed.index]
        batch = feed.take()
        end = batch.end
        if end is not None and end.error is not None:
            raise end.error
        if self.plan.top_count is not None and len(batch.logprobs or ()) != len(batch.ids):
            raise internal()
        before = choice.text.tokens
        piece = choice.text.feed(
            batch.ids,
            batch.logprobs if self.plan.top_count is not None else None,
            ended=end is not None,
            stop_token=end is not None and end.stop_token,
        )
        self._on_tokens(feed.index, choice.text.tokens - before)
        if piece.stopped:
            self._session.abort(choice.handle)
            self._finish(choice, "stop", end)
        elif end is not None:
            self._finish(choice, _REASONS[end.reason], end)
        return ChoiceDelta(feed.index, piece.text, piece.entries, choice.finish_reason)

    def _finish(self, choice: _Choice, reason: str, end: SequenceEnded | None) -> None:
        choice.finish_reason = reason
        choice.cached_tokens = end.cached_tokens if end is not None else None
        self._open -= 1
