"""Tokens that text never spells."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import msgspec
from llguidance import LLTokenizer


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def control_tokens(tokenizer_json: bytes, tokenizer: LLTokenizer) -> dict[str, int]:
    """Return the ids of the control tokens of a tokenizer.json, by the text that stands for each.

    They are those that llguidance takes for such: added tokens that are special, or look like <this>.

    Args:
        tokenizer_json: the file.
        tokenizer: made from it.

    Raises:
        ValueError: it is no tokenizer.json.
    """
    file = msgspec.json.decode(tokenizer_json, type=_TokenizerFile)
    return {
        token.content: token.id
        for token in file.added_tokens
        if token.content and 0 <= token.id < tokenizer.vocab_size and tokenizer.is_special_token(token.id)
    }


def split_control(text: str, control: Mapping[str, int]) -> Iterator[str | int]:
    """Split `text` into plain text and ids of control tokens; of two at one place the longer counts."""
    names = sorted((name for name in control if name in text), key=len, reverse=True)
    start = 0
    for found in re.finditer("|".join(map(re.escape, names)), text) if names else ():
        if found.start() > start:
            yield text[start : found.start()]
        yield control[found[0]]
        start = found.end()
    if start < len(text):
        yield text[start:]
