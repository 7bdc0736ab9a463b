"""Parts of a long text whose tokens are those of the whole: what is cut away is not tokenized.

A text is cut between a letter and a blank with a letter behind it, and only with tokenizers that certainly
begin a token at such a blank and look across it for nothing. That is told by the tokenizer's file: no token
joins a letter with a blank behind it, no normalizer changes either, and what splits the text into words does
so there. That a long text certainly has many tokens follows from the longest token of the vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

_KEEPING_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Prepend", "Lowercase", "ByteLevel"}
_KEEPING_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Digits"}


class _Model(msgspec.Struct):
    type: str = ""
    vocab: Any = None
    byte_fallback: bool = False


class _AddedToken(msgspec.Struct):
    content: str
    lstrip: bool = False
    rstrip: bool = False


class TokenizerFile(msgspec.Struct):
    """The fields of a tokenizer.json that are read here."""

    model: _Model
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    added_tokens: list[_AddedToken] = []


@dataclass(frozen=True, slots=True)
class TokenBound:
    """`longest`: UTF-8 bytes that a token stands for at the most. `dropped`: bytes that need no token."""

    longest: int
    dropped: bytes

    def least_tokens(self, normalized: str) -> int:
        """Return a lower bound of the tokens of a normalized text."""
        counted = len(normalized.encode().translate(None, self.dropped))
        return -(-counted // self.longest)


def token_bound(tokenizer_json: bytes) -> TokenBound | None:
    """Return the bound of a tokenizer, or None where no such number holds: where the tokenizer drops text, or
    where one token for the unknown may stand for any length of it."""
    try:
        file = msgspec.json.decode(tokenizer_json, type=TokenizerFile)
    except msgspec.MsgspecError:
        return None
    vocab = list(vocab_of(file.model.vocab))
    pre_tokenizers = list(steps(file.pre_tokenizer, "pretokenizers"))
    is_byte_level = any(step.get("type") == "ByteLevel" for step in pre_tokenizers)
    keeps_text = (
        all(map(_normalizer_keeps, steps(file.normalizer, "normalizers")))
        and all(map(_pre_tokenizer_keeps, pre_tokenizers))
        and not any(token.lstrip or token.rstrip for token in file.added_tokens)
        and (is_byte_level or file.model.byte_fallback)
    )
    if not keeps_text:
        return None
    longest_added = max((len(token.content.encode()) for token in file.added_tokens), default=1)
    # A byte-level vocabulary writes each byte as one character.
    lengths = (len(token) if is_byte_level else len(token.encode()) for token in vocab)
    return TokenBound(
        longest=max(longest_added, max(lengths, default=1)),
        dropped=_missing_bytes(set(vocab)) if is_byte_level else b"",
    )


def vocab_of(vocab: Any) -> Iterator[str]:
    """Yield the tokens. BPE and WordPiece hold a map from token to id, Unigram a list of (token, score)."""
    if isinstance(vocab, dict):
        yield from vocab
    elif isinstance(vocab, list):
        yield from (entry[0] for entry in vocab)


def _missing_bytes(vocab: set[str]) -> bytes:
    """Return the bytes without a token of their own: byte-level BPE leaves them out in silence."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = {byte: chr(byte) for byte in printable}
    stand_ins |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return bytes(byte for byte, character in stand_ins.items() if character not in vocab)


def steps(component: dict[str, Any] | None, key: str) -> Iterator[dict[str, Any]]:
    """Yield the parts of a normalizer or pre-tokenizer, `key` naming those of a sequence of them."""
    if component is None:
        return
    if component.get("type") == "Sequence":
        for step in component.get(key, ()):
            yield from steps(step, key)
    else:
        yield component


def _normalizer_keeps(step: dict[str, Any]) -> bool:
    if step.get("type") == "Replace":
        return "String" in step.get("pattern", {}) and bool(step.get("content"))
    return step.get("type") in _KEEPING_NORMALIZERS


def _pre_tokenizer_keeps(step: dict[str, Any]) -> bool:
    if step.get("type") in {"Split", "Punctuation"}:
        return step.get("behavior") != "Removed"
    return step.get("type") in _KEEPING_PRE_TOKENIZERS


_CUT = re.compile("[a-z](?= [a-z])")
# A blank as vocabularies write it, behind a letter.
_JOINED = re.compile("[a-z][\u0120\u2581 ]")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
# Normalizers that look at no more than one character and the marks behind it.
_LOCAL = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer", "Precompiled"}
# Pre-tokenizers that make no difference between a text and its parts, though they do not split at blanks.
_WHOLE = {"ByteLevel", "Metaspace", "Digits"}
_PROBES = (
    "xa bx",
    "1a b1",
    "'s a b 's",
    ".a b.",
    "\na b\n",
    " a b ",
    "  a b  ",
    "a b",
    "a b\n\n",
    "ça bç",
    "中a b中",
)
# Characters for each token that a part is begun with, and the fewest of a part.
_PACE, _LEAST = 8, 2048
# Characters on each side of a cut by which it is tried out.
_WINDOW = 64


class TextCutter:
    """Cuts texts for one tokenizer. `encode` gives ids without those that are put around a text, `words` the
    pieces that its pre-tokenizer makes of a text."""

    def __init__(
        self, tokenizer_json: bytes, encode: Callable[[str], list[int]], words: Callable[[str], list[str]]
    ) -> None:
        self._encode = encode
        file = _read(tokenizer_json)
        self._cuts = file is not None and _is_local(file) and _splits(file, words)
        # It puts a blank before a text, before a part too.
        prepends = file is not None and any(
            step.get("type") == "Prepend" for step in steps(file.normalizer, "normalizers")
        )
        self._cuts_tails = self._cuts and not prepends and not _strips(file)

    def head(self, text: str, count: int) -> str:
        """Return the beginning of `text`, or all of it, whose tokens are at least `count`, the first of the
        text."""
        size = max(_LEAST, _PACE * count)
        while self._cuts and size < len(text):
            cut = next(self._cuts_behind(text, size), None)
            if cut is None:
                break
            if len(self._encode(text[:cut])) >= count:
                return text[:cut]
            size = 4 * cut
        return text

    def tail(self, text: str, count: int) -> str:
        """Return the end of `text`, or all of it, whose tokens are at least `count`, the last of the text."""
        size = max(_LEAST, _PACE * count)
        while self._cuts_tails and size < len(text):
            cut = next(self._cuts_before(text, len(text) - size), None)
            if cut is None:
                break
            if len(self._encode(text[cut:])) >= count:
                return text[cut:]
            size = 4 * (len(text) - cut)
        return text

    def _cuts_behind(self, text: str, start: int) -> Iterator[int]:
        for match in _CUT.finditer(text, start):
            cut = match.end()
            window = self._encode(text[max(0, cut - _WINDOW) : cut + _WINDOW])
            left = self._encode(text[max(0, cut - _WINDOW) : cut])
            if window[: len(left)] == left:
                yield cut

    def _cuts_before(self, text: str, end: int) -> Iterator[int]:
        while end > 0:
            start = max(0, end - _LEAST)
            for match in reversed(list(_CUT.finditer(text, start, end))):
                cut = match.end()
                window = self._encode(text[max(0, cut - _WINDOW) : cut + _WINDOW])
                right = self._encode(text[cut : cut + _WINDOW])
                if right and window[-len(right) :] == right:
                    yield cut
            end = start


def _read(tokenizer_json: bytes) -> TokenizerFile | None:
    try:
        return msgspec.json.decode(tokenizer_json, type=TokenizerFile)
    except msgspec.MsgspecError:
        return None


def _is_local(file: TokenizerFile) -> bool:
    """Whether what is done to a text at a cut does not depend on what is behind it."""
    return all(map(_keeps_blanks, steps(file.normalizer, "normalizers"))) and not any(
        _JOINED.search(token.content)
        or (token.lstrip and token.content[:1].isalpha())
        or (token.rstrip and token.content[-1:].isalpha())
        for token in file.added_tokens
    )


def _keeps_blanks(step: dict[str, Any]) -> bool:
    if step.get("type") == "Replace":
        pattern = step.get("pattern", {})
        return pattern in ({"String": " "}, {"Regex": " {2,}"})
    return step.get("type") in _LOCAL | {"Prepend", "Strip"}


def _strips(file: TokenizerFile | None) -> bool:
    return file is not None and any(
        step.get("type") == "Strip" for step in steps(file.normalizer, "normalizers")
    )


def _splits(file: TokenizerFile, words: Callable[[str], list[str]]) -> bool:
    """Whether each word is tokenized by itself, or at least no token reaches over a cut."""
    pre_tokenizers = list(steps(file.pre_tokenizer, "pretokenizers"))
    patterns = [step.get("pattern", {}).get("Regex", "") for step in pre_tokenizers]
    if any("(?<" in pattern or "\\G" in pattern for pattern in patterns):
        return False
    if all(_ends_words(words, probe) for probe in _PROBES):
        return True
    whole = all(step.get("type") in _WHOLE for step in pre_tokenizers)
    tokens = set(vocab_of(file.model.vocab))
    joins = any(_JOINED.search(token) for token in tokens)
    return file.model.type == "BPE" and whole and not joins and tokens.issuperset(_LETTERS)


def _ends_words(words: Callable[[str], list[str]], probe: str) -> bool:
    """Whether a word ends with the `a` of the probe, and another one has its `b`."""
    found = words(probe)
    ends = [index for index, word in enumerate(found) if word.endswith("a")]
    return any("b" in word for index in ends for word in found[index + 1 :])
