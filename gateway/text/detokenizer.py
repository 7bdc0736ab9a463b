"""Token ids to text, one token at a time, never cutting a character."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

CONTEXT_TOKENS = 6
"""Prompt tokens that decide how the first generated ones read: a character takes at most four."""

_REPLACEMENT = "\ufffd"
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(ABC):
    """Decodes one sequence.

    The texts of all `push` calls and of `flush`, joined, equal the decoding of all ids at once. A character
    whose bytes are spread over tokens appears with the last of them. Bytes that begin a character at the
    end of the prompt count: the first token may complete it. No other part of the prompt is ever repeated."""

    @abstractmethod
    def push(self, token_id: int) -> str:
        """Text that this token makes certain."""

    @abstractmethod
    def flush(self) -> str:
        """What an unfinished character at the end is worth: one U+FFFD, or nothing."""


class ByteDetokenizer(Detokenizer):
    """For vocabularies whose tokens are byte strings (byte-level BPE)."""

    __slots__ = ("_bytes_of", "_decoder", "_unproven")

    def __init__(self, bytes_of: Callable[[int], bytes], prompt: Sequence[int]) -> None:
        """Begin where `prompt` ends.

        Args:
            bytes_of: bytes that a token shows; empty for a token that is left out of the text.
            prompt: the prompt's ids, of which only the last few are looked at.
        """
        self._bytes_of = bytes_of
        self._decoder = _Utf8Decoder("replace")
        tail = b"".join(bytes_of(token_id) for token_id in prompt[-CONTEXT_TOKENS:])
        self._unproven = _unfinished(tail)
        self._decoder.decode(self._unproven)

    def push(self, token_id: int) -> str:
        data = self._bytes_of(token_id)
        if self._unproven and data:
            if not _continues(self._unproven, data[0]):
                # The prompt ended inside a character that is not gone on with: that was the prompt's affair.
                self._decoder.reset()
            self._unproven = b""
        return self._decoder.decode(data)

    def flush(self) -> str:
        if self._unproven:
            return ""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer(Detokenizer):
    """For any other decoder: decodes a short window again with each token and shows what is new in it."""

    __slots__ = ("_decode", "_hidden", "_ids", "_read")

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        is_hidden: Callable[[int], bool],
        prompt: Sequence[int],
    ) -> None:
        """Begin where `prompt` ends.

        Args:
            decode: ids to text.
            is_hidden: whether a token is left out of the text.
            prompt: the prompt's ids, of which only the last few are looked at.
        """
        self._decode = decode
        self._hidden = is_hidden
        self._ids = [token_id for token_id in prompt[-CONTEXT_TOKENS:] if not is_hidden(token_id)]
        self._read = len(self._ids)
        while self._read and decode(self._ids[: self._read]).endswith(_REPLACEMENT):
            self._read -= 1

    def push(self, token_id: int) -> str:
        if self._hidden(token_id):
            return ""
        self._ids.append(token_id)
        text = self._new_text()
        unfinished = text.endswith(_REPLACEMENT) and len(self._ids) - self._read <= CONTEXT_TOKENS
        if not text or unfinished:
            return ""
        # The tokens shown last stay as context: some decoders treat the first token of a text apart.
        del self._ids[: self._read]
        self._read = len(self._ids)
        return text

    def flush(self) -> str:
        text = self._new_text()
        self._read = len(self._ids)
        return text

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
