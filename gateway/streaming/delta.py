"""Deltas of choices: a sequence's tokens as text, and log probabilities in the shapes of the API."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from catenary.text import Detokenizer, StopScanner, Vocabulary
from gateway.parsing.output import Part


class TokenLogprob(NamedTuple):
    """Natural-log probabilities of one token and of the best alternatives, best first."""

    sampled: float
    top_ids: tuple[int, ...]
    top_values: tuple[float, ...]


class LogprobEntry(NamedTuple):
    """Token whose text has been shown.

    token_id: its id; offset: the character of the shown text at which it begins; logprob: None for the first
    token of a prompt, which nothing precedes; data: the bytes of its text, None for a token that is left out
    of the text."""

    token_id: int
    offset: int
    logprob: TokenLogprob | None
    data: bytes | None


def cut_bytes(begun: bytes, data: bytes, shown: str) -> bytes:
    """Return those of a token's bytes that belong to the characters `shown`, where its text is cut.

    `begun`: the bytes in front of the token that begin the first of these characters."""
    for length in range(len(data)):
        if (begun + data[:length]).decode("utf-8", "replace") == shown:
            return data[:length]
    return data


@dataclass(frozen=True, slots=True)
class PromptReport:
    """Requested data of a prompt.

    token_ids: its ids; logprobs: each id with its log probability (None for the first). Each is None if it
    was not requested."""

    token_ids: Sequence[int] | None = None
    logprobs: Sequence[tuple[int, TokenLogprob | None]] | None = None


class ChoiceDelta(msgspec.Struct, frozen=True):
    """New output of a choice. A struct, since there is one for each token: it is made in a fifth of the time.

    index: of the choice; text: new text; entries: log probabilities that became certain; finish_reason:
    "stop", "length", "tool_calls" or "function_call", with its last part; stop_reason: the stop string or the
    requested stop token that ended it; token_ids: new tokens; prompt: with the first part, if requested;
    parts: parsed parts, which may lag behind the text; None: the text is not parsed."""

    index: int
    text: str
    entries: tuple[LogprobEntry, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: Sequence[int] = ()
    prompt: PromptReport | None = None
    parts: Sequence[Part] | None = None


def joined(deltas: Sequence[ChoiceDelta]) -> ChoiceDelta:
    """Join deltas of one choice that followed one another."""
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
    """Finished choice. `entries` and `token_ids` are None if they were not requested, `parts` if the text is
    not parsed."""

    index: int
    text: str
    entries: tuple[LogprobEntry, ...] | None
    finish_reason: str
    stop_reason: str | int | None = None
    token_ids: Sequence[int] | None = None
    prompt: PromptReport | None = None
    parts: Sequence[Part] | None = None


class Echo:
    """Text of a prompt, decoded by the detokenizer that then decodes a choice: a character that begins in the
    prompt belongs to the part where it ends."""

    __slots__ = ("_detokenizer", "_ids", "_places", "text")

    def __init__(self, detokenizer: Detokenizer, ids: Sequence[int]) -> None:
        """Decode the prompt with a fresh `detokenizer`, which is used up."""
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
        """Return a decoder that continues from the prompt's end."""
        return self._detokenizer.fork()

    def entries(self, logprobs: Sequence[TokenLogprob]) -> tuple[LogprobEntry, ...]:
        """Return all tokens with their log probabilities; the first one has none."""
        return tuple(
            LogprobEntry(token_id, offset, logprob, data)
            for token_id, (offset, data), logprob in zip(
                self._ids, self._places, (None, *logprobs), strict=True
            )
        )


FLOOR = -9999.0
"""Log probability that is written for a token that cannot be sampled: JSON has no infinity."""


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
    """Names of tokens in log probabilities: their text, or `token_id:` and their id."""

    __slots__ = ("_as_ids", "_odd_prefix", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, *, as_ids: bool = False, odd_prefix: str = "") -> None:
        """Make names. `odd_prefix`: of the names of tokens that are not whole characters."""
        self._vocabulary = vocabulary
        self._as_ids = as_ids
        self._odd_prefix = odd_prefix

    def of(self, token_id: int) -> tuple[str, bytes | None]:
        """Return a token's name and its bytes in a text, None for a control token."""
        data = self._vocabulary.token_bytes(token_id)
        hidden = self._vocabulary.is_special(token_id)
        return self._name(token_id, data), None if hidden else data

    def of_entry(self, entry: LogprobEntry) -> tuple[str, bytes | None]:
        """Return the same for a token in its text."""
        data = entry.data
        whole = self._vocabulary.token_bytes(entry.token_id) if data is None else data
        return self._name(entry.token_id, whole), data

    def _name(self, token_id: int, data: bytes) -> str:
        return f"token_id:{token_id}" if self._as_ids else token_name(data, self._odd_prefix)


def chat_logprobs(entries: Sequence[LogprobEntry], names: TokenNames) -> ChatLogprobs:
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
    """Return the `logprobs` object of a completion choice.

    Where alternatives were requested, the token itself is always among them. The first token of an echoed
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
    """Return vLLM's `prompt_logprobs`: for each token of the prompt the candidates at its position, by their
    ids; None for the first one. None if they were not requested."""
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
    """Return a token's text, or for incomplete characters its bytes in hex, which stay unique."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{value:02x}" for value in data)


def _listed(data: bytes | None) -> list[int] | None:
    return None if data is None else list(data)


def _finite(value: float) -> float:
    """Return an engine's value clamped to the range of log probabilities."""
    if not value > FLOOR:
        return FLOOR
    return value if value < 0 else 0.0


class Piece(msgspec.Struct, frozen=True):
    """Text that may be shown now. A struct for the reason that ChoiceDelta is one.

    text: new text; entries: log probabilities that became certain; count: how many of the tokens fed belong
    to the sequence; stop: the stop string that was found, at which the text ends."""

    text: str
    entries: tuple[LogprobEntry, ...] = ()
    count: int = 0
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Options of where a sequence's text ends.

    stops: stop strings; min_tokens: so many first tokens are not searched for them; include_stop: the stop
    string or token is part of the text; scores_stop_token: a stop token that is not shown has a log
    probability too; keeps_offsets: `SequenceText.offsets` is kept; settles: the parser looks for stop strings
    in the text, so that counts and log probabilities wait for `SequenceText.settle`."""

    stops: Sequence[str] = ()
    min_tokens: int = 0
    include_stop: bool = False
    scores_stop_token: bool = False
    keeps_offsets: bool = False
    settles: bool = False


class _Queued(NamedTuple):
    entry: LogprobEntry
    # So much text must be shown before nothing of the token can be cut away any more.
    end: int
    begun: bytes
    text: str


class SequenceText:
    """Conversion of one sequence's tokens to text.

    A token's log probability is shown together with its text: held back with it, left out if the text was cut
    away in front of it, and with fewer bytes if the text was cut inside of it. Once a stop string matched,
    later tokens are ignored and not counted."""

    __slots__ = (
        "_decoded",
        "_detokenizer",
        "_options",
        "_plain",
        "_queue",
        "_scanner",
        "_settled",
        "offsets",
        "searched",
        "stopped",
        "tokens",
    )

    def __init__(self, detokenizer: Detokenizer, options: TextOptions, offset: int = 0) -> None:
        """Make an empty text. `offset`: characters of the shown text in front of the sequence's own."""
        self._detokenizer = detokenizer
        self._options = options
        self._scanner = StopScanner(options.stops) if options.stops else None
        # The text is neither searched nor kept.
        self._plain = not options.stops and not options.keeps_offsets and not options.settles
        self._queue: deque[_Queued] = deque()
        self._decoded = offset
        self._settled = 0
        self.searched = offset
        """Character from which stop strings are looked for."""
        self.tokens = 0
        """Tokens generated, those without a text of their own included."""
        self.stopped = False
        self.offsets = array("Q")
        """Where the text of each token begins, if that is kept, but for a stop token that is not shown."""

    @property
    def counted(self) -> int:
        """Tokens that are certain to be part of the answer."""
        return self._settled if self._options.settles else self.tokens

    def feed(
        self,
        ids: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None = None,
        *,
        ended: bool = False,
        stop_token: bool = False,
    ) -> Piece:
        """Take the next tokens.

        Args:
            ids: new token ids.
            logprobs: one for each id, or None.
            ended: nothing follows.
            stop_token: the last id is the one that ended the sequence.
        """
        if self.stopped:
            return Piece("")
        if self._plain and logprobs is None and not ended:
            text = "".join(map(self._detokenizer.push, ids))
            self.tokens += len(ids)
            self._decoded += len(text)
            return Piece(text, (), len(ids))
        last = len(ids) - 1 if stop_token and ids else len(ids)
        if last < len(ids) and self._options.include_stop and not self._detokenizer.hides(ids[last]):
            last += 1
        shown: list[str] = []
        before = self.tokens
        for index in range(last):
            self.tokens += 1
            found = self._push(ids[index], logprobs[index] if logprobs is not None else None, shown)
            if found is not None:
                return self._piece(shown, before, found)
        self.tokens += len(ids) - last
        found = None
        if ended:
            found = self._read(self._detokenizer.flush(), shown)
            if found is None and self._scanner is not None:
                shown.append(self._scanner.flush())
            if last < len(ids) and logprobs is not None and self._options.scores_stop_token:
                entry = LogprobEntry(ids[last], self._decoded, logprobs[last], None)
                self._queue.append(_Queued(entry, self._decoded, b"", ""))
        return self._piece(shown, before, found, ended=ended)

    def _push(self, token_id: int, logprob: TokenLogprob | None, shown: list[str]) -> str | None:
        detokenizer = self._detokenizer
        if self._options.keeps_offsets or self._options.settles:
            self.offsets.append(self._decoded)
        if logprob is None:
            return self._read(detokenizer.push(token_id), shown)
        begun = detokenizer.begun
        text = detokenizer.push(token_id)
        entry = LogprobEntry(token_id, self._decoded, logprob, detokenizer.last_bytes(token_id, text))
        end = self._decoded + len(text) + (1 if detokenizer.begun else 0)
        self._queue.append(_Queued(entry, end, begun, text))
        return self._read(text, shown)

    def _read(self, text: str, shown: list[str]) -> str | None:
        """Read text, and return the stop string that it completes."""
        if not text:
            return None
        if self._scanner is None or self.tokens <= self._options.min_tokens:
            # Text of the guaranteed tokens is not searched, as end-of-sequence tokens are not sampled among
            # them.
            self._decoded += len(text)
            if self.tokens <= self._options.min_tokens:
                self.searched = self._decoded
            shown.append(text)
            return None
        held = self._scanner.held
        scan = self._scanner.feed(text)
        shown.append(scan.text)
        if scan.matched is None:
            self._decoded += len(text)
            return None
        self.stopped = True
        self._decoded += len(scan.text) - held
        if self._options.include_stop:
            shown.append(scan.matched)
            self._decoded += len(scan.matched)
        return scan.matched

    def settle(self, place: int, *, ended: bool) -> Piece:
        """Return the piece that became certain: no stop string cuts the text in front of this character.
        `ended`: nor behind it."""
        before = self._settled
        self._settled = self.tokens if ended else max(before, bisect_right(self.offsets, place))
        return Piece("", self._entries(place, ended=ended), self._settled - before)

    def cut(self, shown: int, end: int, stop: str) -> Piece:
        """Return the last piece, before a stop string that ends in front of character `end` of the text, of
        which so many are `shown`."""
        before = self._settled
        self.stopped = True
        self.tokens = self._settled = bisect_left(self.offsets, end)
        del self.offsets[self.tokens :]
        return Piece("", self._entries(shown, ended=True), self._settled - before, stop)

    def _piece(self, shown: list[str], before: int, stop: str | None, *, ended: bool = False) -> Piece:
        if self._options.settles:
            return Piece("".join(shown))
        end = self._decoded - (self._scanner.held if self._scanner is not None else 0)
        return Piece("".join(shown), self._entries(end, ended=ended), self.tokens - before, stop)

    def _entries(self, end: int, *, ended: bool) -> tuple[LogprobEntry, ...]:
        """Return the entries whose text ends before character `end`, or is cut there by a stop string."""
        queue = self._queue
        if not queue:
            return ()
        entries: list[LogprobEntry] = []
        while queue and (queue[0].end <= end or (ended and not self.stopped)):
            entries.append(queue.popleft().entry)
        if self.stopped and queue and queue[0].entry.offset < end:
            entry, _, begun, text = queue.popleft()
            data = cut_bytes(begun, entry.data or b"", text[: end - entry.offset])
            entries.append(entry._replace(data=data))
        return tuple(entries)
