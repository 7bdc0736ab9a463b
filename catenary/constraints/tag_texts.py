"""Texts of structural tags in Lark."""

from __future__ import annotations

from collections.abc import Mapping

from catenary.constraints.control_tokens import split_control
from catenary.constraints.lark import lark_text

_META = frozenset("\\.+*?()|[]{}^$#&-~/")


def atoms(text: str, control: Mapping[str, int]) -> str:
    """A text as Lark, its control tokens by their ids."""
    return " ".join(map(atom, split_control(text, control)))


def atom(piece: str | int) -> str:
    """A text without control tokens, or one."""
    return f"<[{piece}]>" if isinstance(piece, int) else lark_text(piece)


def escaped(text: str) -> str:
    """A text as a regular expression."""
    return "".join(f"\\x{{{ord(char):x}}}" if char in _META or not char.isalnum() else char for char in text)
