"""One sequence's text: tokens in; visible text, log probabilities and the stop-string verdict out."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from catenary.text import Detokenizer, StopScanner
from gateway.streaming.delta import LogprobEntry, TokenLogprob, cut_bytes


class Piece(msgspec.Struct, frozen=True):
    """What may be shown now. A struct for the reason that ChoiceDelta is one.

    text: new text; entries: log probabilities that came to it; count: how many of the tokens that were fed
    belong to the sequence; stop: the stop string that was found, at which the text ends."""

    text: str
    entries: tuple[LogprobEntry, ...] = ()
    count: int = 0
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How a sequence's text ends.

    stops: stop strings; min_tokens: among so many first tokens none is looked for; include_stop: the stop
    string or token is part of the text; scores_stop_token: a stop token that is not shown has a log
    probability too; keeps_offsets: `SequenceText.offsets` is kept; settles: another one looks for stop
    strings in the text, so that counts and log probabilities wait for `SequenceText.settle`."""

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
    """Turns one sequence's tokens into text.

    A token's log probability is shown together with its text: held back with it, left out if the text was
    cut away in front of it, and with fewer bytes if the text was cut inside of it. Once a stop string
    matched, later tokens are ignored and not counted."""

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
        """`offset`: characters of the shown text that stand in front of the sequence's own."""
        self._detokenizer = detokenizer
        self._options = options
        self._scanner = StopScanner(options.stops) if options.stops else None
        # Nothing is looked for in the text, nor kept of it.
        self._plain = not options.stops and not options.keeps_offsets and not options.settles
        self._queue: deque[_Queued] = deque()
        self._decoded = offset
        self._settled = 0
        self.searched = offset
        """Where stop strings are looked for: from this character on."""
        self.tokens = 0
        """Tokens generated, those without a text of their own included."""
        self.stopped = False
        self.offsets = array("Q")
        """Where the text of each token begins, if that is kept, but for a stop token that is not shown."""

    @property
    def counted(self) -> int:
        """How many of the tokens are certain to be part of the answer."""
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
        """The stop string that the text completes."""
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
        """What came to be certain: no stop string cuts the text in front of this character. `ended`: nor
        behind it."""
        before = self._settled
        self._settled = self.tokens if ended else max(before, bisect_right(self.offsets, place))
        return Piece("", self._entries(place, ended=ended), self._settled - before)

    def cut(self, shown: int, end: int, stop: str) -> Piece:
        """The same, where a stop string was found that ends in front of character `end` of the text, of which
        so many are `shown`."""
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
        """Those whose text ends in front of character `end`, where one that a stop string cut ends too."""
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
