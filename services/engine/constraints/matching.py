"""What a library that matches tokens against grammars has to offer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from services.engine.domain import ConstraintOptions

Bits = np.ndarray[Any, np.dtype[np.int32]]
"""Sets of tokens, int32 [.., W]: token t is bit t % 32 of number t // 32."""


class ConstraintRefused(Exception):
    """A constraint that cannot be honoured, or does not fit its sequence. One line, for the caller."""


class Matcher(Protocol):
    """How far one sequence has come in its grammar. Nothing here raises for what a grammar does."""

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Goes on by these tokens. False if one of them may not follow: the matcher is of no use then."""

    def allows(self, token_id: int) -> bool:
        """True if the token may follow."""

    @property
    def accepting(self) -> bool:
        """True if the text so far is one of the grammar's."""

    @property
    def failed(self) -> bool:
        """True if it ran into a limit, or took a token that may not follow."""


class Grammar(Protocol):
    """A compiled constraint."""

    def matcher(self) -> Matcher:
        """A new matcher at its beginning. Takes microseconds."""


class GrammarBackend(Protocol):
    """Compiles grammars, and asks many matchers at once."""

    def compile(self, options: ConstraintOptions) -> Grammar:
        """Compiles, in any thread, in seconds at worst. Raises ConstraintRefused."""

    def fill(self, matchers: Sequence[tuple[Matcher, int]], bits: Bits) -> None:
        """Sets row i of bits [M, W] to the tokens that a matcher allows next, for each (matcher, i).

        If its text may end, the bits of the vocabulary's `closing` may be set as well. The row of one that
        fails says nothing.
        """
