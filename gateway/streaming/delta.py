"""Parts of choices as a request yields them, and log probabilities in the shapes of the API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from catenary.text import Detokenizer, Vocabulary
from gateway.parsing.output import Part


class TokenLogprob(NamedTuple):
    """Natural-log probabilities of one token and of the best alternatives, best first."""

    sampled: float
    top_ids: tuple[int, ...]
    top_values: tuple[float, ...]


class LogprobEntry(NamedTuple):
    """A token whose text has been shown.

    token_id: its id; offset: the character of the shown text at which it begins; logprob: None for the first
    token of a prompt, which nothing precedes; data: the bytes of the text that it stands for, None for a
    token that is left out of the text."""

    token_id: int
    offset: int
    logprob: TokenLogprob | None
    data: bytes | None


def cut_bytes(begun: bytes, data: bytes, shown: str) -> bytes:
    """What of a token's bytes belongs to the characters `shown`, if the rest of its text is not shown.

    `begun`: the bytes in front of the token that begin the first of these characters."""
    for length in range(len(data)):
        if (begun + data[:length]).decode("utf-8", "replace") == shown:
            return data[:length]
    return data


@dataclass(frozen=True, slots=True)
class PromptReport:
    """What an answer tells of a prompt.

    token_ids: its ids, if they were asked for. logprobs: each id with its log probability (None for the
    first), if these were asked for."""

    token_ids: Sequence[int] | None = None
    logprobs: Sequence[tuple[int, TokenLogprob | None]] | None = None


class ChoiceDelta(msgspec.Struct, frozen=True):
    """New output of a choice. A struct, since there is one for each token: it is made in a fifth of the time.

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
    """Join deltas of one choice that came one after the other."""
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


class Echo:
    """A prompt's text, decoded from its tokens with what decodes the choices too: a character that the
    prompt begins and a choice ends stands where it ends."""

    __slots__ = ("_detokenizer", "_ids", "_places", "text")

    def __init__(self, detokenizer: Detokenizer, ids: Sequence[int]) -> None:
        """`detokenizer`: one that begins with nothing; it is used up."""
        texts: list[str] = []
        self._places: list[tuple[int, bytes | None]] = []
        offset = 0
        for token_id in ids:
            text = detokenizer.push(token_id)
            self._places.append((offset, detokenizer.last_bytes(token_id, text)))
            offset += len(text)
            texts.append(text)
        self._ids = ids
        self._detokenizer = detokenizer
        self.text = "".join(texts)

    def detokenizer(self) -> Detokenizer:
        """What goes on from the prompt's end."""
        return self._detokenizer.fork()

    def entries(self, logprobs: Sequence[TokenLogprob]) -> tuple[LogprobEntry, ...]:
        """All tokens with their log probabilities, of which the first one has none."""
        return tuple(
            LogprobEntry(token_id, offset, logprob, data)
            for token_id, (offset, data), logprob in zip(
                self._ids, self._places, (None, *logprobs), strict=True
            )
        )


FLOOR = -9999.0
"""What is written for a token that cannot be sampled: JSON has no infinity."""


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """Four arrays of one length; `text_offset` counts characters from the start of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptLogprob(msgspec.Struct):
    """One candidate at one place of a prompt; `rank` is None for one that is not among the best."""

    logprob: float
    rank: int | None
    decoded_token: str


class TokenNames:
    """How tokens are named in log probabilities: by their text, or by `token_id:` and their id."""

    __slots__ = ("_as_ids", "_odd_prefix", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, *, as_ids: bool = False, odd_prefix: str = "") -> None:
        """`odd_prefix`: of the names of tokens that are no whole characters."""
        self._vocabulary = vocabulary
        self._as_ids = as_ids
        self._odd_prefix = odd_prefix

    def of(self, token_id: int) -> tuple[str, bytes | None]:
        """A token's name and the bytes that it stands for in a text, None for a control token."""
        data = self._vocabulary.token_bytes(token_id)
        hidden = self._vocabulary.is_special(token_id)
        return self._name(token_id, data), None if hidden else data

    def of_entry(self, entry: LogprobEntry) -> tuple[str, bytes | None]:
        """The same of one in its text."""
        data = entry.data
        whole = self._vocabulary.token_bytes(entry.token_id) if data is None else data
        return self._name(entry.token_id, whole), data

    def _name(self, token_id: int, data: bytes) -> str:
        return f"token_id:{token_id}" if self._as_ids else token_name(data, self._odd_prefix)


def chat_logprobs(entries: Sequence[LogprobEntry], names: TokenNames) -> ChatLogprobs:
    """The `logprobs` object of a chat choice."""
    content = []
    for entry in entries:
        if entry.logprob is None:
            continue
        own = names.of_entry(entry)
        top = []
        for token_id, value in zip(entry.logprob.top_ids, entry.logprob.top_values, strict=True):
            name, data = own if token_id == entry.token_id else names.of(token_id)
            top.append(TopLogprob(name, _finite(value), _listed(data)))
        content.append(ChatLogprob(own[0], _finite(entry.logprob.sampled), _listed(own[1]), top))
    return ChatLogprobs(content)


def completion_logprobs(entries: Sequence[LogprobEntry], names: TokenNames) -> CompletionLogprobs:
    """The `logprobs` object of a completion choice.

    Where alternatives were asked for, the token itself is always among them. The first token of an echoed
    prompt has neither a log probability nor alternatives."""
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        name, _ = names.of_entry(entry)
        tokens.append(name)
        if entry.logprob is None:
            values.append(None)
            tops.append(None)
            continue
        value = _finite(entry.logprob.sampled)
        top: dict[str, float] = {}
        for token_id, other in zip(entry.logprob.top_ids, entry.logprob.top_values, strict=True):
            top.setdefault(name if token_id == entry.token_id else names.of(token_id)[0], _finite(other))
        if top:
            top.setdefault(name, value)
        values.append(value)
        tops.append(top)
    offsets = [entry.offset for entry in entries]
    return CompletionLogprobs(tokens, values, tops if any(tops) else None, offsets)


def prompt_logprobs(report: PromptReport, names: TokenNames) -> list[dict[str, PromptLogprob] | None] | None:
    """vLLM's `prompt_logprobs`: for each token of the prompt the candidates at its place, by their ids; None
    for the first one. None if they were not asked for."""
    if report.logprobs is None:
        return None
    places: list[dict[str, PromptLogprob] | None] = []
    for own, logprob in report.logprobs:
        if logprob is None:
            places.append(None)
            continue
        place = {
            str(token_id): PromptLogprob(_finite(value), rank, names.of(token_id)[0])
            for rank, (token_id, value) in enumerate(
                zip(logprob.top_ids, logprob.top_values, strict=True), start=1
            )
        }
        if str(own) not in place:
            place[str(own)] = PromptLogprob(_finite(logprob.sampled), None, names.of(own)[0])
        places.append(place)
    return places


def token_name(data: bytes, prefix: str = "") -> str:
    """A token's text, or where that is no whole characters its bytes in hex, which stay unique."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{value:02x}" for value in data)


def _listed(data: bytes | None) -> list[int] | None:
    return None if data is None else list(data)


def _finite(value: float) -> float:
    """What an engine told, as a number that a log probability can have, whatever it told."""
    if not value > FLOOR:
        return FLOOR
    return value if value < 0 else 0.0
