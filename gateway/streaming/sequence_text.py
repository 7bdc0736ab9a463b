"""One sequence's text: tokens in; visible text, log probabilities and the stop-string verdict out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gateway.streaming.stop import StopScanner
from gateway.text.detokenizer import Detokenizer


class TokenLogprob(NamedTuple):
    """Natural-log probabilities of one sampled token and of the best alternatives, best first."""

    sampled: float
    top_ids: tuple[int, ...]
    top_values: tuple[float, ...]


class LogprobEntry(NamedTuple):
    """A token whose text has been shown; that begins at character `offset` of the completion."""

    token_id: int
    offset: int
    logprob: TokenLogprob


@dataclass(frozen=True, slots=True)
class Piece:
    """What may be shown now. `stopped`: a stop string was found; the text ends here."""

    text: str
    entries: tuple[LogprobEntry, ...] = ()
    stopped: bool = False


class SequenceText:
    """Turns one sequence's tokens into text.

    A token's log probability is shown together with its text: held back with it, and left out if the text
    was cut away in front of it. Once a stop string matched, later tokens are ignored and not counted."""

    __slots__ = ("_decoded", "_detokenizer", "_min_tokens", "_queue", "_scanner", "stopped", "tokens")

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._scanner = StopScanner(stops) if stops else None
        self._min_tokens = min_tokens
        self._queue: deque[LogprobEntry] = deque()
        self._decoded = 0
        self.tokens = 0
        """Tokens generated, those without a text of their own included."""
        self.stopped = False

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
            stop_token: the last id is the one that ended the sequence; it is counted and not shown.
        """
        if self.stopped:
            return Piece("")
        shown: list[str] = []
        visible = len(ids) - 1 if stop_token and ids else len(ids)
        for index in range(visible):
            if logprobs is not None:
                self._queue.append(LogprobEntry(ids[index], self._decoded, logprobs[index]))
            self.tokens += 1
            if self._read(self._detokenizer.push(ids[index]), shown):
                return self._piece(shown, last=True)
        self.tokens += len(ids) - visible
        if ended:
            tail = self._detokenizer.flush()
            if not self._read(tail, shown) and self._scanner is not None:
                shown.append(self._scanner.flush())
        return self._piece(shown, last=ended)

    def _read(self, text: str, shown: list[str]) -> bool:
        if not text:
            return False
        if self._scanner is None or self.tokens <= self._min_tokens:
            # Text of the guaranteed tokens is not searched, as end-of-sequence tokens are not sampled among
            # them.
            self._decoded += len(text)
            shown.append(text)
            return False
        held = self._scanner.held
        scan = self._scanner.feed(text)
        shown.append(scan.text)
        if scan.matched:
            self.stopped = True
            self._decoded += len(scan.text) - held
            return True
        self._decoded += len(text)
        return False

    def _piece(self, shown: list[str], *, last: bool) -> Piece:
        text = "".join(shown)
        if not self._queue:
            return Piece(text, (), self.stopped)
        end = self._decoded - (self._scanner.held if self._scanner is not None else 0)
        entries: list[LogprobEntry] = []
        while self._queue and (self._queue[0].offset < end or (last and not self.stopped)):
            entries.append(self._queue.popleft())
        return Piece(text, tuple(entries), self.stopped)
