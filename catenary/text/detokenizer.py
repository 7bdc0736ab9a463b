"""Token ids to text, one token at a time, never cutting a character."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from typing import Self

CONTEXT_TOKENS = 6
"""Prompt tokens that decide how the first generated ones read: a character takes at most four."""

_REPLACEMENT = "\ufffd"
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(ABC):
    """Decodes one sequence.

    The texts of all `push` calls and of `flush`, joined, equal the decoding of all ids at once, where bytes
    that are no text are U+FFFD as in UTF-8 that is read with replacements. A character
    whose bytes are spread over tokens appears with the last of them. Bytes that begin a character at the
    end of the prompt count: the first token may complete it. No other part of the prompt is ever repeated.

    What `last_bytes` says of each token, joined and decoded with U+FFFD for what is no text, equals the text
    too."""

    @abstractmethod
    def push(self, token_id: int) -> str:
        """Return the text that this token makes certain."""

    @abstractmethod
    def flush(self) -> str:
        """Return the text of an unfinished character at the end: one U+FFFD, or nothing."""

    @abstractmethod
    def last_bytes(self, token_id: int, text: str) -> bytes | None:
        """Return the bytes of the text that a token stands for; None for one that is left out of it.

        To be called once, right after `push` of the token, which returned `text`.
        """

    @property
    @abstractmethod
    def begun(self) -> bytes:
        """Bytes of tokens that were pushed and whose text is not certain yet."""

    @abstractmethod
    def hides(self, token_id: int) -> bool:
        """Whether a token is left out of the text."""

    @abstractmethod
    def fork(self) -> Self:
        """Return a decoder in the same state."""


class ByteDetokenizer(Detokenizer):
    """For vocabularies whose tokens are byte strings (byte-level BPE)."""

    __slots__ = ("_bytes_of", "_completed", "_decoder", "_unproven")

    def __init__(self, bytes_of: Callable[[int], bytes], prompt: Sequence[int]) -> None:
        """Begin where `prompt` ends.

        Args:
            bytes_of: bytes that a token shows; empty for a token that is left out of the text.
            prompt: the prompt's ids, of which only the last few are looked at.
        """
        self._bytes_of = bytes_of
        self._decoder = _Utf8Decoder("replace")
        tail = b"".join(bytes_of(token_id) for token_id in prompt[-CONTEXT_TOKENS:])
        # Bytes at the prompt's end that may begin a character; once a token has gone on with them, these.
        self._unproven = _unfinished(tail)
        self._completed = b""
        self._decoder.decode(self._unproven)

    def push(self, token_id: int) -> str:
        data = self._bytes_of(token_id)
        if self._unproven and data:
            if _continues(self._unproven, data[0]):
                self._completed = self._unproven
            else:
                # The prompt ended inside a character that is not gone on with: that was the prompt's affair.
                self._decoder.reset()
            self._unproven = b""
        return self._decoder.decode(data)

    def flush(self) -> str:
        if self._unproven:
            return ""
        return self._decoder.decode(b"", final=True)

    def last_bytes(self, token_id: int, text: str) -> bytes | None:
        data = self._completed + self._bytes_of(token_id)
        self._completed = b""
        return data or None

    @property
    def begun(self) -> bytes:
        return b"" if self._unproven else self._decoder.getstate()[0]

    def hides(self, token_id: int) -> bool:
        return not self._bytes_of(token_id)

    def fork(self) -> Self:
        other = type(self)(self._bytes_of, ())
        other._unproven, other._completed = self._unproven, self._completed
        other._decoder.setstate(self._decoder.getstate())
        return other


class WindowDetokenizer(Detokenizer):
    """For any other decoder: decodes a short window again with each token and shows what is new in it.

    Tokens that stand for single bytes are read by themselves, as UTF-8: a decoder makes the bytes of a whole
    run U+FFFD if one of them is wrong, characters included that were shown long before."""

    __slots__ = (
        "_byte_of",
        "_bytes_of",
        "_decode",
        "_glue",
        "_glued",
        "_hidden",
        "_ids",
        "_opening",
        "_own",
        "_read",
        "_run",
        "_waiting",
        "_waits",
    )

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        is_hidden: Callable[[int], bool],
        bytes_of: Callable[[int], bytes],
        prompt: Sequence[int],
        glued: Container[int] = (),
        byte_of: Callable[[int], bytes] | None = None,
    ) -> None:
        """Begin where `prompt` ends.

        Args:
            decode: ids to text.
            is_hidden: whether a token is left out of the text.
            bytes_of: bytes of a token by itself.
            prompt: the prompt's ids, of which only the last few are looked at.
            glued: tokens that stand as they are, without a space, behind another one of them.
            byte_of: the byte that a token stands for; empty for one that is text. None: a text that ends
                with U+FFFD may have begun a character, for some tokens more.
        """
        self._decode = decode
        self._hidden = is_hidden
        self._bytes_of = bytes_of
        self._byte_of = byte_of or _no_bytes
        self._waits = byte_of is None
        self._waiting = False
        self._glued = glued
        self._glue = bool(prompt) and prompt[-1] in glued
        # What was shown last stays as context: some decoders treat the first token of a text apart.
        self._ids = [token_id for token_id in prompt[-CONTEXT_TOKENS:] if not is_hidden(token_id)]
        run: list[int] = []
        while len(run) < len(self._ids) and self._byte_of(self._ids[-1 - len(run)]):
            run.insert(0, self._ids[-1 - len(run)])
        # Reads the bytes that the text ends with; None: it does not end with any.
        self._run = ByteDetokenizer(self._byte_of, run) if run else None
        # The bytes that a text begins with, of which the decoder may drop a space.
        self._opening: list[int] | None = None if self._ids else []
        if run:
            del self._ids[:-1]
        self._read = len(self._ids)
        while self._waits and self._read and decode(self._ids[: self._read]).endswith(_REPLACEMENT):
            self._read -= 1
        # The bytes that the last token stands for in the text.
        self._own = b""

    def push(self, token_id: int) -> str:
        if self._hidden(token_id):
            return ""
        if self._byte_of(token_id):
            return self._push_byte(token_id)
        lead = ""
        if self._run is not None:
            lead = self._run.flush()
            self._run = None
        self._opening = None
        self._ids.append(token_id)
        text, late = self._new_text(), self._waiting
        self._waiting = self._waits and text.endswith(_REPLACEMENT) and self._waits_on()
        if self._waiting or late:
            self._own = self._bytes_of(token_id)
        if self._waiting:
            return ""
        if text:
            del self._ids[: self._read]
            self._read = len(self._ids)
            if token_id not in self._glued:
                self._glue = False
            elif self._glue:
                text = self._bytes_of(token_id).decode("utf-8", "replace")
            else:
                self._glue = True
        if not late:
            # A decoder may write a token otherwise than it reads by itself: it drops the first one's space.
            self._own = text.encode()
        return lead + text

    def _new_text(self) -> str:
        shown = self._decode(self._ids[: self._read])
        return self._decode(self._ids)[len(shown) :]

    def _waits_on(self) -> bool:
        return len(self._ids) - self._read <= CONTEXT_TOKENS

    def _push_byte(self, token_id: int) -> str:
        run = self._run
        if run is None:
            run = self._run = ByteDetokenizer(self._byte_of, ())
        text = run.push(token_id)
        self._own = run.last_bytes(token_id, text) or b""
        self._glue = False
        self._ids, self._read = [token_id], 1
        if self._opening is not None:
            self._opening.append(token_id)
            if text and text != _REPLACEMENT:
                whole = self._decode(self._opening)
                if not text.startswith(_REPLACEMENT) and whole != text:
                    text, self._own = whole, whole.encode()
            if text or not run.begun:
                self._opening = None
        return text

    def flush(self) -> str:
        run, self._run = self._run, None
        if run is not None:
            return run.flush()
        text = self._new_text() if self._waiting else ""
        self._read, self._waiting = len(self._ids), False
        return text

    def last_bytes(self, token_id: int, text: str) -> bytes | None:
        return None if self._hidden(token_id) else self._own

    @property
    def begun(self) -> bytes:
        if self._waiting:
            return b"".join(map(self._bytes_of, self._ids[self._read :]))
        return b"" if self._run is None else self._run.begun

    def hides(self, token_id: int) -> bool:
        return self._hidden(token_id)

    def fork(self) -> Self:
        other = type(self)(self._decode, self._hidden, self._bytes_of, (), self._glued, self._byte_of)
        other._waits, other._waiting = self._waits, self._waiting
        other._ids, other._read, other._glue = list(self._ids), self._read, self._glue
        other._run = None if self._run is None else self._run.fork()
        other._opening = None if self._opening is None else list(self._opening)
        other._own = self._own
        return other


def _no_bytes(_: int) -> bytes:
    return b""


def _unfinished(data: bytes) -> bytes:
    """Return the bytes at the end of `data` that begin a character without ending it."""
    decoder = _Utf8Decoder("replace")
    decoder.decode(data)
    return decoder.getstate()[0]


def _continues(begun: bytes, byte: int) -> bool:
    try:
        _Utf8Decoder("strict").decode(begun + bytes((byte,)))
    except UnicodeDecodeError:
        return False
    return True
