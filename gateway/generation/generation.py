"""Running requests: sequences on the session, and their output as deltas of choices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from catenary.text import Detokenizer
from catenary.v1 import common_pb2
from gateway.errors import bad_request, internal, timed_out
from gateway.generation.plan import GenerationPlan
from gateway.link.inbox import Batch, Inbox, SequenceEnded, SequenceFeed, Session
from gateway.parsing.choice import TextParser
from gateway.parsing.output import Part
from gateway.streaming.answers import Usage, usage_of
from gateway.streaming.delta import (
    ChoiceDelta,
    Echo,
    LogprobEntry,
    Piece,
    PromptReport,
    SequenceText,
    TextOptions,
    TokenLogprob,
    joined,
)

# Decoding so many tokens would delay other requests on the loop.
LONG_PROMPT_TOKENS = 4096


class Prompt:
    """Prompt of a request. Its choices wait for all of its log probabilities, from its first sequence."""

    __slots__ = ("_echo", "_entries", "_ids", "_plan", "_values", "_wanted", "deferred", "known")

    def __init__(self, plan: GenerationPlan, ids: Sequence[int]) -> None:
        self._plan = plan
        self._ids = ids
        fields = plan.fields
        self._wanted = fields.prompt_top_count is not None
        self._values: list[TokenLogprob] = []
        self._entries: tuple[LogprobEntry, ...] | None = None
        self._echo = Echo(plan.detokenizer(()), ids) if fields.echoes else None
        self.known = not self._wanted or len(ids) == 1
        """Whether all log probabilities are here."""
        self.deferred: list[SequenceFeed] = []
        """Feeds that wait for them."""

    def add(self, values: Sequence[TokenLogprob], *, last: bool) -> bool:
        """Add log probabilities, and return whether they are complete; `last`: none follow.

        Raises ApiError if there are too few or too many."""
        self._values += values
        missing = len(self._ids) - 1 - len(self._values)
        if missing < 0 or (missing and last):
            raise internal()
        self.known = not missing
        return self.known

    def detokenizer(self) -> Detokenizer:
        return self._echo.detokenizer() if self._echo is not None else self._plan.detokenizer(self._ids)

    @property
    def text(self) -> str:
        """Text in front of each choice."""
        return self._echo.text if self._echo is not None else ""

    def entries(self) -> tuple[LogprobEntry, ...]:
        """Return the log probabilities that belong to `text`."""
        count = self._plan.top_count
        if self._echo is None or count is None:
            return ()
        if self._entries is None:
            self._entries = self._echo.entries([_best(value, count) for value in self._values])
        return self._entries

    def report(self) -> PromptReport | None:
        """Return the requested ids and log probabilities of the prompt; None if none were requested."""
        fields = self._plan.fields
        if fields.prompt_logprobs is None and not fields.return_token_ids:
            return None
        logprobs = None
        if fields.prompt_logprobs is not None:
            best = [_best(value, fields.prompt_logprobs) for value in self._values]
            logprobs = list(zip(self._ids, (None, *best), strict=True))
        return PromptReport(self._ids if fields.return_token_ids else None, logprobs)


async def read_prompts(plan: GenerationPlan) -> list[Prompt]:
    """Return the prompts of a request, decoded where they are echoed."""
    if plan.fields.echoes and plan.prompt_tokens > LONG_PROMPT_TOKENS:
        return await asyncio.to_thread(_read, plan)
    return _read(plan)


def _read(plan: GenerationPlan) -> list[Prompt]:
    return [Prompt(plan, ids) for ids in plan.prompts]


def _best(value: TokenLogprob, count: int) -> TokenLogprob:
    if len(value.top_ids) <= count:
        return value
    return TokenLogprob(value.sampled, value.top_ids[:count], value.top_values[:count])


_REASONS: dict[int, str] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}


class Choice:
    """Conversion of one choice's tokens to deltas. The first one contains the report on the prompt."""

    __slots__ = (
        "_called",
        "_opened",
        "_parser",
        "_plan",
        "_prompt",
        "_prompt_only",
        "_ranks",
        "_reports",
        "_scored",
        "_settles",
        "_single",
        "_tells_ids",
        "_text",
        "_waiting",
        "finish_reason",
        "index",
        "logprob",
    )

    def __init__(self, plan: GenerationPlan, index: int, prompt: Prompt, options: TextOptions) -> None:
        self._plan = plan
        self._prompt = prompt
        self._text = SequenceText(prompt.detokenizer(), options, len(prompt.text))
        self._parser = plan.parser(index)
        self._opened = False
        self._called = False
        # Looked at with every token.
        self._prompt_only = plan.prompt_only
        self._scored = plan.scored is not None
        self._reports = plan.top_count is not None
        self._ranks = plan.ranks
        self._tells_ids = bool(plan.fields.return_token_ids)
        self._single = plan.ends_with_call
        self._settles = options.settles
        # Tokens that are not known to be part of the answer yet.
        self._waiting: tuple[list[int], list[TokenLogprob]] = [], []
        self.index = index
        self.finish_reason: str | None = None
        self.logprob = 0.0
        """Sum of the tokens' log probabilities, where candidates are ranked by it."""

    @property
    def tokens(self) -> int:
        """Tokens generated that are part of the answer for certain."""
        return self._text.counted

    @property
    def reasoning_tokens(self) -> int:
        if self._parser is None:
            return 0
        return min(self.tokens, self._parser.reasoning_tokens(self._text.offsets))

    @property
    def stopped(self) -> bool:
        """Whether a stop string or the one wanted call ended it, and not the engine."""
        return self._text.stopped or self._called

    @property
    def mean_logprob(self) -> float:
        return self.logprob / max(1, self.tokens)

    def read(
        self,
        ids: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None,
        reason: common_pb2.FinishReason.ValueType | None,
        stop_token: int | None,
    ) -> ChoiceDelta:
        """Take the next tokens, and the finish reason with the last ones.

        Raises ApiError if log probabilities are missing."""
        if not self._single or len(ids) < 2:
            return self._read(ids, logprobs, reason, stop_token)
        # One after the other: text behind the call does not count.
        deltas = []
        for place in range(len(ids)):
            last = place == len(ids) - 1
            some = slice(place, place + 1)
            deltas.append(
                self._read(
                    ids[some],
                    None if logprobs is None else logprobs[some],
                    reason if last else None,
                    stop_token if last else None,
                )
            )
            if self.finish_reason is not None:
                break
        return joined(deltas)

    def _read(
        self,
        ids: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None,
        reason: common_pb2.FinishReason.ValueType | None,
        stop_token: int | None,
    ) -> ChoiceDelta:
        if self._prompt_only:
            ids, logprobs, stop_token = (), None, None
        elif not self._scored:
            logprobs = None
        elif len(logprobs or ()) != len(ids):
            raise internal()
        piece = self._text.feed(
            ids,
            logprobs if self._reports else None,
            ended=reason is not None,
            stop_token=stop_token is not None,
        )
        parts = None
        if self._parser is not None:
            parts = self._parse(self._parser, piece.text, ended=reason is not None)
            if self._settles:
                piece = self._settled(self._parser, piece.text, ended=reason is not None)
                ids, logprobs = self._counted(ids, logprobs, piece.count)
        if self._ranks and logprobs is not None:
            self.logprob += sum(logprob.sampled for logprob in logprobs[: piece.count])
        stop_reason = self._end(piece.stop, reason, stop_token)
        text, entries, report = piece.text, piece.entries, None
        if not self._opened:
            self._opened = True
            text, entries = self._prompt.text + text, self._prompt.entries() + entries
            report = self._prompt.report()
        told = ids[: piece.count] if self._tells_ids else ()
        return ChoiceDelta(self.index, text, entries, self.finish_reason, stop_reason, told, report, parts)

    def _parse(self, parser: TextParser, text: str, *, ended: bool) -> list[Part]:
        """Return the parts in new text. Where one call is all that is wanted, its end ends the answer."""
        parser.search_from(self._text.searched)
        parts = parser.feed(text)
        if self._single and parser.called and self._text.tokens >= (self._plan.fields.min_tokens or 0):
            self._called = True
        if ended or self._called:
            parts += parser.finish()
        return parts

    def _settled(self, parser: TextParser, text: str, *, ended: bool) -> Piece:
        """Return the piece that new text has made certain, where the parser looks for stop strings."""
        if (stop := parser.stop) is not None:
            settled = self._text.cut(stop.shown, stop.end, stop.text)
        else:
            settled = self._text.settle(parser.settled, ended=ended or self._called)
        return Piece(text, settled.entries, settled.count, settled.stop)

    def _counted(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None, count: int
    ) -> tuple[Sequence[int], Sequence[TokenLogprob] | None]:
        """Return the next `count` tokens of those that arrived now or before."""
        if not (self._tells_ids or self._ranks):
            return ids, logprobs
        waiting_ids, waiting_logprobs = self._waiting
        waiting_ids += ids
        waiting_logprobs += logprobs or ()
        told_ids, told_logprobs = waiting_ids[:count], waiting_logprobs[:count]
        del waiting_ids[:count], waiting_logprobs[:count]
        return told_ids, None if logprobs is None else told_logprobs

    def _end(
        self,
        stop: str | int | None,
        reason: common_pb2.FinishReason.ValueType | None,
        stop_token: int | None,
    ) -> str | int | None:
        """Set the finish reason, if the text has ended. Return the stop string or token that stopped it, if
        the request named it."""
        if stop is not None or self._called:
            self.finish_reason = "stop"
        elif reason is not None:
            self.finish_reason = "length" if self._prompt_only else _REASONS[reason]
            if stop_token in (self._plan.fields.stop_token_ids or ()):
                stop = stop_token
        if self.finish_reason == "stop" and self._parser is not None and self._parser.called:
            self.finish_reason = self._plan.parsing.called_reason
        return stop


def text_options(plan: GenerationPlan) -> TextOptions:
    fields = plan.fields
    # Where the texts are parsed, the parser decides which part is searched for stop strings.
    parsed = plan.parsing.needed
    return TextOptions(
        () if parsed else fields.stops,
        fields.min_tokens or 0,
        bool(fields.include_stop_str_in_output),
        plan.prepared.scores_stop_token,
        keeps_offsets=bool(plan.parsing.reasoning_parser),
        settles=parsed and bool(fields.stops),
    )


# Name of the constraint in the errors of engines, which know no fields of requests.
_CONSTRAINT = "constraint"


class _Sequence:
    """Sequence on the session. `choices`: the texts that it yields, for a beam search several."""

    __slots__ = ("cached_tokens", "choices", "handle", "open", "prompt")

    def __init__(self, handle: int, prompt: Prompt) -> None:
        self.handle = handle
        self.prompt = prompt
        self.choices: list[Choice] = []
        self.open = True
        self.cached_tokens: int | None = None


class Generation:
    """Running generation, an async context manager: leaving it aborts the sequences that have not ended.

    `submit` sends them, `begin` waits for the engine's first answer, `next` yields that and then waits for
    more output until all is `done`; an error of one sequence is an error of the request."""

    def __init__(
        self,
        plan: GenerationPlan,
        session: Session,
        *,
        max_unread_tokens: int,
        deadline: float,
        on_tokens: Callable[[int, int], None],
    ) -> None:
        """Prepare a generation; `submit` sends it.

        Args:
            plan: the checked request.
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
        """Whether every choice has ended and `next` has returned its end."""
        return self._open == 0 and self._first is None

    @property
    def choices(self) -> list[Choice]:
        return [choice for sequence in self._sequences for choice in sequence.choices]

    @property
    def finish_reasons(self) -> list[str | None]:
        """Finish reason of each choice, None while it goes on."""
        return [choice.finish_reason for choice in self.choices]

    def interrupt(self, error: Exception) -> None:
        self._inbox.interrupt(error)

    async def submit(self, traceparent: str | None) -> None:
        """Send all sequences to the router. Raises ApiError; sequences sent before it are aborted on exit."""
        late = timed_out("The request took longer than the server allows.")
        # One timer for all: one for each token would cost as much as reading it.
        self._timer = asyncio.get_running_loop().call_at(self._deadline, self._inbox.interrupt, late)
        prompts = await read_prompts(self.plan)
        for number, spec in enumerate(self.plan.specs(traceparent)):
            place, sample = divmod(number, self.plan.sequences)
            leader = self._sequences[number - sample].handle if sample else None
            handle = self._session.submit(spec, self._inbox.feed(number), leader)
            self._sequences.append(_Sequence(handle, prompts[place]))
        # It goes out now: the readers of the output are made while the engine works.
        await asyncio.sleep(0)
        self._make_choices()

    async def begin(self) -> None:
        """Wait for an engine's first answer, before which a request can still be refused.

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
        """Return the next output, possibly empty. Raises ApiError, or the error of `interrupt`."""
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
        """Return the counts up to now; cached tokens only once they are known of every prompt."""
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
            # Allowed or banned tokens may leave no more.
            raise bad_request(f"The search has found {found} answers; n asks for {asked}.", "n")
        for choice, beam in zip(sequence.choices, end.beams, strict=True):
            deltas.append(choice.read(beam.ids, beam.logprobs, beam.reason, beam.stop_token))
            self._on_tokens(choice.index, choice.tokens)
        self._close(sequence, end)

    def _close(self, sequence: _Sequence, end: SequenceEnded | None) -> None:
        sequence.open = False
        sequence.cached_tokens = end.cached_tokens if end is not None else None
        self._open -= 1
