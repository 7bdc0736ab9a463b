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

    The texts of all `push` calls and of `flush`, joined, equal the decoding of all ids at once. A character
    whose bytes are spread over tokens appears with the last of them. Bytes that begin a character at the
    end of the prompt count: the first token may complete it. No other part of the prompt is ever repeated.

    What `last_bytes` says of each token, joined and decoded with U+FFFD for what is no text, equals the text
    too."""

    @abstractmethod
    def push(self, token_id: int) -> str:
        """Text that this token makes certain."""

    @abstractmethod
    def flush(self) -> str:
        """What an unfinished character at the end is worth: one U+FFFD, or nothing."""

    @abstractmethod
    def last_bytes(self, token_id: int, text: str) -> bytes | None:
        """The bytes of the text that a token stands for; None for one that is left out of it. To be asked
        once, right after `push` of the token, which gave `text`."""

    @property
    @abstractmethod
    def begun(self) -> bytes:
        """Bytes of tokens that were pushed and whose text is not certain yet."""

    @abstractmethod
    def hides(self, token_id: int) -> bool:
        """Whether a token is left out of the text."""

    @abstractmethod
    def fork(self) -> Self:
        """One that goes on from the same place."""


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
    """For any other decoder: decodes a short window again with each token and shows what is new in it."""

    __slots__ = (
        "_bytes_of",
        "_decode",
        "_glue",
        "_glued",
        "_hidden",
        "_ids",
        "_late",
        "_read",
        "_unfinished",
        "_unproven",
    )

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        is_hidden: Callable[[int], bool],
        bytes_of: Callable[[int], bytes],
        prompt: Sequence[int],
        glued: Container[int] = (),
    ) -> None:
        """Begin where `prompt` ends.

        Args:
            decode: ids to text.
            is_hidden: whether a token is left out of the text.
            bytes_of: bytes of a token by itself.
            prompt: the prompt's ids, of which only the last few are looked at.
            glued: tokens that stand as they are, without a space, behind another one of them.
        """
        self._decode = decode
        self._hidden = is_hidden
        self._bytes_of = bytes_of
        self._glued = glued
        self._glue = bool(prompt) and prompt[-1] in glued
        self._ids = [token_id for token_id in prompt[-CONTEXT_TOKENS:] if not is_hidden(token_id)]
        self._read = len(self._ids)
        while self._read and decode(self._ids[: self._read]).endswith(_REPLACEMENT):
            self._read -= 1
        # Bytes that begin a character at the prompt's end, until a token goes on with them.
        self._unproven = b"".join(map(bytes_of, self._ids[self._read :]))
        # Whether the text of the last token, and of the one before, waits for more bytes.
        self._unfinished = self._late = bool(self._unproven)

    def push(self, token_id: int) -> str:
        if self._hidden(token_id):
            return ""
        self._ids.append(token_id)
        self._late = self._unfinished
        text = self._new_text()
        self._unfinished = text.endswith(_REPLACEMENT) and len(self._ids) - self._read <= CONTEXT_TOKENS
        if not text or self._unfinished:
            return ""
        # The tokens shown last stay as context: some decoders treat the first token of a text apart.
        del self._ids[: self._read]
        self._read = len(self._ids)
        if token_id not in self._glued:
            self._glue = False
        elif self._glue:
            return self._bytes_of(token_id).decode("utf-8", "replace")
        else:
            self._glue = True
        return text

    def flush(self) -> str:
        text = self._new_text()
        self._read = len(self._ids)
        return text

    def last_bytes(self, token_id: int, text: str) -> bytes | None:
        if self._hidden(token_id):
            return None
        unproven, self._unproven = self._unproven, b""
        if self._late or self._unfinished:
            return unproven + self._bytes_of(token_id)
        # A decoder may write a token otherwise than it reads by itself, as it drops the first one's space.
        return text.encode()

    @property
    def begun(self) -> bytes:
        if self._unproven or not self._unfinished:
            return b""
        return b"".join(map(self._bytes_of, self._ids[self._read :]))

    def hides(self, token_id: int) -> bool:
        return self._hidden(token_id)

    def fork(self) -> Self:
        other = type(self)(self._decode, self._hidden, self._bytes_of, (), self._glued)
        other._ids, other._read, other._glue = list(self._ids), self._read, self._glue
        other._unproven, other._unfinished, other._late = self._unproven, self._unfinished, self._late
        return other

    def _new_text(self) -> str:
        shown = self._decode(self._ids[: self._read])
        return self._decode(self._ids)[len(shown) :]


def _unfinished(data: bytes) -> bytes:
    """The bytes at the end of `data` that begin a character without ending it."""
    decoder = _Utf8Decoder("replace")
    decoder.decode(data)
    return decoder.getstate()[0]


def _continues(begun: bytes, byte: int) -> bool:
    try:
        _Utf8Decoder("strict").decode(begun + bytes((byte,)))
    except UnicodeDecodeError:
        return False
    return True
