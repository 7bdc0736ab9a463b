"""One regular expression for many literals, in time linear in the text however many there are.

A plain alternation tries every literal at every position: with the thousands of reserved tokens that some
tokenizers have, a megabyte of `<` would take minutes. A trie shares their prefixes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


class _Node:
    __slots__ = ("children", "is_end")

    def __init__(self) -> None:
        self.children: dict[str, _Node] = {}
        self.is_end = False


def literal_pattern(literals: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds the leftmost literal, and of those the longest; without any, nothing."""
    root = _Node()
    for literal in literals:
        node = root
        for character in literal:
            node = node.children.setdefault(character, _Node())
        node.is_end = node is not root
    return re.compile(_branches(root) if root.children else "(?!)")


def _branches(node: _Node) -> str:
    expressions = [_expression(character, child) for character, child in sorted(node.children.items())]
    group = expressions[0] if len(expressions) == 1 else "(?:" + "|".join(expressions) + ")"
    return f"(?:{group})?" if node.is_end else group


def _expression(character: str, node: _Node) -> str:
    # Chains without a fork become one literal, so that depth grows with forks and not with length.
    chain = [character]
    while len(node.children) == 1 and not node.is_end:
        character, node = next(iter(node.children.items()))
        chain.append(character)
    literal = re.escape("".join(chain))
    return literal + _branches(node) if node.children else literal
