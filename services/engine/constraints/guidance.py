"""Grammars by llguidance."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, cast

import llguidance
from llguidance.numpy import fill_next_token_bitmask_par

from catenary.constraints import (
    DEFAULT_LIMITS,
    ConstraintError,
    ConstraintLimits,
    explain,
    parser_limits,
    to_llguidance,
)
from services.engine.constraints.vocabulary import Bits, ConstraintRefused, Grammar, Matcher, Vocabulary
from services.engine.domain import ConstraintOptions

_STACK_BYTES: Final = 16 * 2**20


class GuidanceMatcher:
    """Implements `Matcher`."""

    def __init__(self, inner: llguidance.LLMatcher) -> None:
        self.inner = inner

    def accept(self, token_ids: Sequence[int]) -> bool:
        return self.inner.consume_tokens(list(token_ids))

    def allows(self, token_id: int) -> bool:
        return self.inner.validate_tokens([token_id]) == 1

    @property
    def accepting(self) -> bool:
        return self.inner.is_accepting()

    @property
    def failed(self) -> bool:
        return self.inner.is_error()


class GuidanceGrammar:
    """Implements `Grammar`."""

    def __init__(self, first: llguidance.LLMatcher) -> None:
        self._first = first

    def matcher(self) -> Matcher:
        return GuidanceMatcher(self._first.deep_copy())


class GuidanceBackend:
    """Implements `GrammarBackend` with so many threads that fill masks, for constraints within `limits`."""

    def __init__(
        self, vocabulary: Vocabulary, threads: int, limits: ConstraintLimits = DEFAULT_LIMITS
    ) -> None:
        self._vocabulary = vocabulary
        self._bounds = limits
        # Of its threads. Their default is a quarter of what grammars within our limits may need.
        os.environ.setdefault("RUST_MIN_STACK", str(_STACK_BYTES))
        self._executor = llguidance.LLExecutor(threads)
        self._limits = parser_limits()

    def compile(self, options: ConstraintOptions) -> Grammar:
        vocabulary = self._vocabulary
        try:
            source = to_llguidance(
                options.kind, options.source, self._bounds, vocabulary.control, closed=options.closed
            )
        except ConstraintError as error:
            raise ConstraintRefused(str(error)) from None
        # Its own messages show the grammar, which is nothing for a log.
        first = llguidance.LLMatcher(vocabulary.guide, source, log_level=0, limits=self._limits)
        if first.is_error():
            raise ConstraintRefused(explain(first.get_error()))
        return GuidanceGrammar(first)

    def fill(self, matchers: Sequence[tuple[Matcher, int]], bits: Bits) -> None:
        pairs = [(cast(GuidanceMatcher, matcher).inner, row) for matcher, row in matchers]
        fill_next_token_bitmask_par(self._executor, pairs, bits)
