"""Parts of choices as a request yields them, and whole choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from gateway.parsing.events import Part
from gateway.streaming.entries import LogprobEntry, TokenLogprob


@dataclass(frozen=True, slots=True)
class PromptReport:
    """What an answer tells of a prompt.

    token_ids: its ids, if they were asked for. logprobs: each id with its log probability (None for the
    first), if these were asked for."""

    token_ids: Sequence[int] | None = None
    logprobs: Sequence[tuple[int, TokenLogprob | None]] | None = None


class ChoiceDelta(msgspec.Struct, frozen=True):
    """News of a choice. A struct, since there is one for each token: it is made in a fifth of the time.

    index: of the choice; text: new text; entries: log probabilities that came to it; finish_reason: why it
    ended ("stop", "length", "tool_calls" or "function_call"), with its last part; stop_reason: the stop
    string or the requested stop token that ended it; token_ids: new tokens; prompt: with the first part, if
    anything was asked of the prompt; parts: what was read in the text, which may come later than the text;
    None: nothing is read in it."""

    index: int
    text: str
    entries: tuple[LogprobEntry, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: Sequence[int] = ()
    prompt: PromptReport | None = None
    parts: Sequence[Part] | None = None


def joined(deltas: Sequence[ChoiceDelta]) -> ChoiceDelta:
    """News of one choice that came one after the other, as one."""
    first, last = deltas[0], deltas[-1]
    return ChoiceDelta(
        first.index,
        "".join(delta.text for delta in deltas),
        tuple(entry for delta in deltas for entry in delta.entries),
        last.finish_reason,
        last.stop_reason,
        [token_id for delta in deltas for token_id in delta.token_ids],
        first.prompt,
        None if first.parts is None else [part for delta in deltas for part in delta.parts or ()],
    )


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """A finished choice. `entries` and `token_ids` are None if they were not asked for, `parts` if nothing is
    read in the text."""

    index: int
    text: str
    entries: tuple[LogprobEntry, ...] | None
    finish_reason: str
    stop_reason: str | int | None = None
    token_ids: Sequence[int] | None = None
    prompt: PromptReport | None = None
    parts: Sequence[Part] | None = None
