"""A running request: its sequences on the session, and their output as deltas of choices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from gateway.errors import bad_request, internal, timed_out
from gateway.generation.choice import Choice, Prompt, read_prompts, text_options
from gateway.generation.plan import GenerationPlan
from gateway.link.inbox import Batch, Inbox, SequenceEnded, SequenceFeed, Session
from gateway.streaming.delta import ChoiceDelta
from gateway.streaming.writer import Usage, usage_of

# What an engine, which knows no fields of requests, calls the constraint.
_CONSTRAINT = "constraint"


class _Sequence:
    """A sequence on the session. `choices`: the texts that come of it, of a beam search several."""

    __slots__ = ("cached_tokens", "choices", "handle", "open", "prompt")

    def __init__(self, handle: int, prompt: Prompt) -> None:
        self.handle = handle
        self.prompt = prompt
        self.choices: list[Choice] = []
        self.open = True
        self.cached_tokens: int | None = None


class Generation:
    """Use as an async context manager: leaving it aborts what has not ended, whatever the reason.

    `submit` sends it off, `begin` waits for the engine's first answer, `next` yields that and then waits for
    more output until all is `done`; an error of one sequence is an error of the request.
    """

    def __init__(
        self,
        plan: GenerationPlan,
        session: Session,
        *,
        max_unread_tokens: int,
        deadline: float,
        on_tokens: Callable[[int, int], None],
    ) -> None:
        """Nothing is sent before `submit`.

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
        self._options = text_options(plan)
        self._inbox = Inbox(max_unread_tokens)
        self._sequences: list[_Sequence] = []
        self._open = len(plan.prompts) * plan.sequences
        self._first: list[ChoiceDelta] | None = None
        self._timer: asyncio.TimerHandle | None = None
        # Looked at with every token.
        self._per_prompt, self._searches = plan.sequences, plan.fields.searches

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for sequence in self._sequences:
            if sequence.open:
                self._session.abort(sequence.handle)

    @property
    def done(self) -> bool:
        """Whether every choice has ended and `next` has told of it."""
        return self._open == 0 and self._first is None

    @property
    def choices(self) -> list[Choice]:
        """All texts of the plan, as far as they were submitted."""
        return [choice for sequence in self._sequences for choice in sequence.choices]

    @property
    def finish_reasons(self) -> list[str | None]:
        """Of each choice, None while it goes on."""
        return [choice.finish_reason for choice in self.choices]

    def interrupt(self, error: Exception) -> None:
        """Make `next` raise."""
        self._inbox.interrupt(error)

    async def submit(self, traceparent: str | None) -> None:
        """Send all sequences to the router. Raises ApiError; what was sent before it is aborted on exit."""
        late = timed_out("The request took longer than the server allows.")
        # One timer for all: one for each token would cost as much as reading it.
        self._timer = asyncio.get_running_loop().call_at(self._deadline, self._inbox.interrupt, late)
        prompts = await read_prompts(self.plan)
        for number, spec in enumerate(self.plan.specs(traceparent)):
            place, sample = divmod(number, self.plan.sequences)
            leader = self._sequences[number - sample].handle if sample else None
            handle = self._session.submit(spec, self._inbox.feed(number), leader)
            self._sequences.append(_Sequence(handle, prompts[place]))
        # It goes out now: what reads the output is made while the others are at work.
        await asyncio.sleep(0)
        self._make_choices()

    async def begin(self) -> None:
        """Wait until an engine has answered for the first time: what can be refused has been then.

        Raises ApiError, or the error of `interrupt`."""
        self._first = await self._wait()

    def _make_choices(self) -> None:
        plan = self.plan
        each = plan.candidates // plan.sequences
        for number, sequence in enumerate(self._sequences):
            sequence.choices = [
                Choice(plan, index, sequence.prompt, self._options)
                for index in range(number * each, (number + 1) * each)
            ]

    async def next(self) -> list[ChoiceDelta]:
        """The next output, maybe none. Raises ApiError, or the error of `interrupt`."""
        if (first := self._first) is not None:
            self._first = None
            return first
        return await self._wait()

    async def _wait(self) -> list[ChoiceDelta]:
        deltas: list[ChoiceDelta] = []
        for feed in await self._inbox.wait():
            if self._sequences[feed.index].open:
                self._read(feed, deltas)
        return deltas

    def usage(self) -> Usage:
        """Counts up to now; cached tokens only once they are known of every prompt."""
        completion = sum(choice.tokens for choice in self.choices)
        leaders = self._sequences[:: self.plan.sequences]
        known = [leader.cached_tokens for leader in leaders if leader.cached_tokens is not None]
        complete = len(known) == len(self.plan.prompts)
        reasoning = None
        if self.plan.parsing.reasoning_parser:
            reasoning = sum(choice.reasoning_tokens for choice in self.choices)
        return usage_of(self.plan.prompt_tokens, completion, sum(known) if complete else None, reasoning)

    def _read(self, feed: SequenceFeed, deltas: list[ChoiceDelta]) -> None:
        sequence = self._sequences[feed.index]
        prompt = sequence.prompt
        if not prompt.known and feed.index % self._per_prompt:
            prompt.deferred.append(feed)
            return
        batch = feed.take()
        end = batch.end
        if end is not None and end.error is not None:
            if end.error.param == _CONSTRAINT:
                wanted = self.plan.prepared.wanted
                end.error.param = None if wanted is None else wanted.param
            raise end.error
        if not prompt.known:
            if not prompt.add(batch.prompt, last=bool(batch.ids) or end is not None):
                return
            for waiting in prompt.deferred:
                self._inbox.mark(waiting)
            prompt.deferred.clear()
        if self._searches:
            if end is not None:
                self._read_beams(sequence, end, deltas)
        else:
            self._read_tokens(sequence, batch, deltas)

    def _read_tokens(self, sequence: _Sequence, batch: Batch, deltas: list[ChoiceDelta]) -> None:
        (choice,) = sequence.choices
        end, before = batch.end, choice.tokens
        reason, stop_token = (None, None) if end is None else (end.reason, end.stop_token)
        deltas.append(choice.read(batch.ids, batch.logprobs, reason, stop_token))
        self._on_tokens(choice.index, choice.tokens - before)
        if choice.stopped:
            self._session.abort(sequence.handle)
        if choice.finish_reason is not None:
            self._close(sequence, end)

    def _read_beams(self, sequence: _Sequence, end: SequenceEnded, deltas: list[ChoiceDelta]) -> None:
        found, asked = len(end.beams), len(sequence.choices)
        if not found or found > asked:
            raise internal()
        if found < asked:
            # What is allowed or banned may leave no more.
            raise bad_request(f"The search has found {found} answers; n asks for {asked}.", "n")
        for choice, beam in zip(sequence.choices, end.beams, strict=True):
            deltas.append(choice.read(beam.ids, beam.logprobs, beam.reason, beam.stop_token))
            self._on_tokens(choice.index, choice.tokens)
        self._close(sequence, end)

    def _close(self, sequence: _Sequence, end: SequenceEnded | None) -> None:
        sequence.open = False
        sequence.cached_tokens = end.cached_tokens if end is not None else None
        self._open -= 1
