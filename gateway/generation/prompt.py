"""The parts of an answer about its prompt: its text, its ids, the log probabilities of its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from catenary.text import Detokenizer
from gateway.errors import internal
from gateway.generation.plan import GenerationPlan
from gateway.link.inbox import SequenceFeed
from gateway.streaming.delta import PromptReport
from gateway.streaming.echo import Echo
from gateway.streaming.entries import LogprobEntry, TokenLogprob

# Decoding so many tokens takes long enough for others to notice.
LONG_PROMPT_TOKENS = 4096


class Prompt:
    """One prompt of a request. Its choices wait until all of its log probabilities are known, which its first
    sequence brings."""

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
        """Take log probabilities, and tell whether they are all here; `last`: none follow.

        Raises ApiError if there are too few or too many."""
        self._values += values
        missing = len(self._ids) - 1 - len(self._values)
        if missing < 0 or (missing and last):
            raise internal()
        self.known = not missing
        return self.known

    def detokenizer(self) -> Detokenizer:
        """What decodes a choice."""
        return self._echo.detokenizer() if self._echo is not None else self._plan.detokenizer(self._ids)

    @property
    def text(self) -> str:
        """What stands in front of each choice."""
        return self._echo.text if self._echo is not None else ""

    def entries(self) -> tuple[LogprobEntry, ...]:
        """The log probabilities that belong to `text`."""
        count = self._plan.top_count
        if self._echo is None or count is None:
            return ()
        if self._entries is None:
            self._entries = self._echo.entries([_best(value, count) for value in self._values])
        return self._entries

    def report(self) -> PromptReport | None:
        """What else is told; None: nothing was asked for."""
        fields = self._plan.fields
        if fields.prompt_logprobs is None and not fields.return_token_ids:
            return None
        logprobs = None
        if fields.prompt_logprobs is not None:
            best = [_best(value, fields.prompt_logprobs) for value in self._values]
            logprobs = list(zip(self._ids, (None, *best), strict=True))
        return PromptReport(self._ids if fields.return_token_ids else None, logprobs)


async def read_prompts(plan: GenerationPlan) -> list[Prompt]:
    """The prompts of a request, decoded where they are echoed."""
    if plan.fields.echoes and plan.prompt_tokens > LONG_PROMPT_TOKENS:
        return await asyncio.to_thread(_read, plan)
    return _read(plan)


def _read(plan: GenerationPlan) -> list[Prompt]:
    return [Prompt(plan, ids) for ids in plan.prompts]


def _best(value: TokenLogprob, count: int) -> TokenLogprob:
    if len(value.top_ids) <= count:
        return value
    return TokenLogprob(value.sampled, value.top_ids[:count], value.top_values[:count])
