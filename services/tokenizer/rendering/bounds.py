"""The longest token of a vocabulary: the reason why a long text certainly has many tokens."""

from __future__ import annotations

from collections.abc import Iterator
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
    """What is read of a tokenizer.json."""

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
        """How many tokens a normalized text has at the least."""
        counted = len(normalized.encode().translate(None, self.dropped))
        return -(-counted // self.longest)


def token_bound(tokenizer_json: bytes) -> TokenBound | None:
    """The bound of a tokenizer, or None where no such number holds.

    That is where the tokenizer drops text, or where one token for the unknown may stand for any length of it.
    """
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
    """BPE and WordPiece hold a map from token to id, Unigram a list of (token, score)."""
    if isinstance(vocab, dict):
        yield from vocab
    elif isinstance(vocab, list):
        yield from (entry[0] for entry in vocab)


def _missing_bytes(vocab: set[str]) -> bytes:
    """Bytes without a token of their own: byte-level BPE leaves them out in silence."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = {byte: chr(byte) for byte in printable}
    stand_ins |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return bytes(byte for byte, character in stand_ins.items() if character not in vocab)


def steps(component: dict[str, Any] | None, key: str) -> Iterator[dict[str, Any]]:
    """The parts of a normalizer or pre-tokenizer, `key` naming those of a sequence of them."""
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
