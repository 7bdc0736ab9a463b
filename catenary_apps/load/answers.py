"""Streamed answers: events out of bytes, their chunks, and the moments at which tokens came."""

from __future__ import annotations

from array import array
from typing import Annotated

import msgspec

# More than anything that could be true, and not too large for any sum or quotient.
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class Usage(msgspec.Struct):
    """Tokens as the server counted them."""

    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt that were not computed; None: not said."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


_NONE = msgspec.Raw(b"null")


class Chunk(msgspec.Struct):
    """One chunk. `error`, JSON, is what a server sends in place of more when it fails; some send the error
    itself, whose `object` says that it is one."""

    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: msgspec.Raw = _NONE
    object: str | None = None

    @property
    def failed(self) -> bool:
        """Whether it is an error."""
        return self.object == "error" or (self.error is not _NONE and bytes(self.error) != b"null")

    @property
    def generated(self) -> bool:
        """Whether it brings anything that was generated: text, reasoning or a call."""
        for choice in self.choices or ():
            if choice.text:
                return True
            delta = choice.delta
            if delta is not None and (
                delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls
            ):
                return True
        return False

    @property
    def finish_reason(self) -> str | None:
        """Why a choice ended, if one did."""
        return next((choice.finish_reason for choice in self.choices or () if choice.finish_reason), None)

    @property
    def text(self) -> str:
        """The text of the first choice, without its reasoning."""
        if not self.choices:
            return ""
        choice = self.choices[0]
        return choice.text or (choice.delta.content if choice.delta is not None else None) or ""


decode_chunk = msgspec.json.Decoder(Chunk).decode


class _ErrorText(msgspec.Struct):
    message: str = ""


class _ErrorBody(msgspec.Struct):
    error: _ErrorText | str | None = None
    message: str | None = None


def error_text(body: bytes, limit: int = 200) -> str:
    """Return the message of a refusal, in one line of at most `limit` characters."""
    try:
        found = msgspec.json.decode(body, type=_ErrorBody)
        inner = found.error.message if isinstance(found.error, _ErrorText) else found.error
        text = inner or found.message or ""
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = ""
    return shown(text or body[: 4 * limit].decode("utf-8", "replace"), limit)


def shown(text: str, limit: int = 200) -> str:
    """Return a server's text in one line that does nothing to a terminal."""
    line = " ".join(text[: 4 * limit].split())[:limit]
    return (
        line
        if line.isprintable()
        else "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in line)
    )


MAX_EVENT_BYTES = 16 << 20

Event = tuple[bytes, bytes]
"""The name of an event (mostly none) and its data."""


class EventTooLarge(ValueError):
    """An event is larger than MAX_EVENT_BYTES."""


class EventReader:
    """Collects events; their ids and comments are left out, and so are those without name and data."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Event]:
        """Return the events that are complete now, in order. Raises EventTooLarge."""
        rest = self._rest
        if rest:
            seam = bytes(rest[-3:]) + data
            rest += data
            # What came before is not looked at again: an event of megabytes comes in thousands of parts.
            if b"\n\n" not in seam and b"\n\r\n" not in seam:
                _check(rest)
                return []
            data = bytes(rest)
        # JSON has no raw carriage return, so lines end with them or with none. One at the end may be half of
        # a line's end.
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *blocks, left = data.split(b"\n\n")
        if rest or left:
            self._rest = bytearray(left)
            _check(self._rest)
        return [event for block in blocks if any(event := _event(block))]


def _check(rest: bytearray) -> None:
    if len(rest) > MAX_EVENT_BYTES:
        raise EventTooLarge(f"an event has more than {MAX_EVENT_BYTES} bytes")


def _event(block: bytes) -> Event:
    if block.startswith(b"data: ") and b"\n" not in block:
        return b"", block[6:]
    name, lines = b"", []
    for line in block.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            lines.append(value)
        elif field == b"event":
            name = value
    return name, b"\n".join(lines)


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
        """The generated text, if it was to be kept."""
        return "".join(self._pieces)

    def head(self, status: int, content_type: bytes) -> None:
        self.started = True
        self.status = status
        self._streamed = status == 200 and content_type.startswith(b"text/event-stream")

    def body(self, data: bytes, now: float) -> None:
        """Take a part of the body. Set `done` once the last event is there, or one is wrong."""
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
        """Take note of a lost connection.

        An answer whose end was told is whole: some servers hang up in place of [DONE], and after a refusal of
        no stated length.
        """
        if self.done:
            return
        if self.started and (self._finished or not self._streamed):
            self.complete(now)
        else:
            self.fail("cut", detail, now)

    def fail(self, kind: str, detail: str, now: float) -> None:
        """End the answer as failed. Only the first reason counts."""
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
