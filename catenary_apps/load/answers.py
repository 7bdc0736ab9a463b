"""An answer while it comes, and what is wrong with it."""

from __future__ import annotations

from array import array

import msgspec

from catenary_apps.load.chunks import Usage, decode_chunk, error_text
from catenary_apps.load.sse import EventReader, EventTooLarge

_MAX_REFUSAL_BYTES = 1 << 16
# What servers say of an answer that they did not get to the end of.
_BROKEN_OFF = frozenset(("abort", "error"))


class Answer:
    """One answer: the connection tells it what comes, and it says when it is over.

    Moments are those of time.monotonic. `moments` are the arrivals of chunks with something generated in
    them. `failure` is the kind of what went wrong (None: nothing), `detail` one line about it.
    """

    __slots__ = (
        "_body",
        "_events",
        "_finished",
        "_keeps_text",
        "_pieces",
        "_streamed",
        "cached_tokens",
        "detail",
        "done",
        "ended",
        "failure",
        "moments",
        "output_tokens",
        "prompt_tokens",
        "started",
        "status",
    )

    def __init__(self, *, keeps_text: bool = False) -> None:
        self.status = 0
        self.started = False
        self.done = False
        self.ended = 0.0
        self.moments = array("d")
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.output_tokens: int | None = None
        self.failure: str | None = None
        self.detail = ""
        self._events = EventReader()
        self._streamed = False
        self._finished = False
        self._keeps_text = keeps_text
        self._pieces: list[str] = []
        self._body = b""

    @property
    def text(self) -> str:
        """What was generated, if it was to be kept."""
        return "".join(self._pieces)

    def head(self, status: int, content_type: bytes) -> None:
        """The status line and the headers came."""
        self.started = True
        self.status = status
        self._streamed = status == 200 and content_type.startswith(b"text/event-stream")

    def body(self, data: bytes, now: float) -> None:
        """A part of the body came. Once the last event is there, or one is wrong, `done` is set."""
        if self.done:
            return
        if not self._streamed:
            self._body += data[: _MAX_REFUSAL_BYTES - len(self._body)]
            return
        try:
            for name, event in self._events.feed(data):
                if self._event(name, event, now):
                    return
        except EventTooLarge as error:
            self.fail("bad_answer", str(error), now)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.fail("bad_answer", "an event is no chunk of this API", now)

    def complete(self, now: float) -> None:
        """The body is over."""
        if self.done:
            return
        if self.status != 200:
            self.fail(f"http_{self.status}", error_text(self._body), now)
        elif not self._streamed:
            self.fail("bad_answer", f"the answer is no event stream: {error_text(self._body)}", now)
        elif self._finished:
            self._end(now)
        else:
            self.fail("cut", "the stream ended before the answer did", now)

    def lost(self, now: float, detail: str) -> None:
        """The connection is gone. An answer whose end was told is whole: some servers hang up in place of
        [DONE], and after a refusal of no stated length."""
        if self.done:
            return
        if self.started and (self._finished or not self._streamed):
            self.complete(now)
        else:
            self.fail("cut", detail, now)

    def fail(self, kind: str, detail: str, now: float) -> None:
        """It will not be whole. Only the first reason counts."""
        if not self.done:
            self.failure, self.detail = kind, detail
            self._end(now)

    def _event(self, name: bytes, event: bytes, now: float) -> bool:
        """Take one event; whether it is the last."""
        if name == b"error":
            self.fail("error_event", error_text(event) or "without a word about it", now)
            return True
        if not event:
            return False
        if event == b"[DONE]":
            if self._finished or self.moments:
                self._end(now)
            else:
                self.fail("bad_answer", "the stream has no answer", now)
            return True
        chunk = decode_chunk(event)
        if chunk.failed:
            self.fail("error_event", error_text(event), now)
            return True
        if chunk.generated:
            self.moments.append(now)
            if self._keeps_text:
                self._pieces.append(chunk.text)
        reason = chunk.finish_reason
        if reason in _BROKEN_OFF:
            self.fail("error_event", f"finish_reason {reason}", now)
            return True
        self._finished = self._finished or reason is not None
        if chunk.usage is not None:
            self._count(chunk.usage)
        return False

    def _count(self, usage: Usage) -> None:
        self.prompt_tokens = usage.prompt_tokens
        self.output_tokens = usage.completion_tokens
        self.cached_tokens = usage.cached_tokens

    def _end(self, now: float) -> None:
        self.done = True
        self.ended = now
