"""Tokens of a model as bytes, and the interface of a library that matches them against grammars."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

import llguidance
import numpy as np

from services.engine.domain import ConstraintOptions

Bits = np.ndarray[Any, np.dtype[np.int32]]
"""Sets of tokens, int32 [.., W]: token t is bit t % 32 of number t // 32."""


class ConstraintRefused(Exception):
    """A constraint that cannot be honoured, or does not fit its sequence. One line, for the caller."""


class Matcher(Protocol):
    """Position of one sequence in its grammar. No method raises for the contents of a grammar."""

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Advance by these tokens. False if one of them may not follow: the matcher is of no use then."""

    def allows(self, token_id: int) -> bool:
        """Return True if the token may follow."""

    @property
    def accepting(self) -> bool:
        """True if the text so far is one of the grammar's."""

    @property
    def failed(self) -> bool:
        """True if it ran into a limit, or took a token that may not follow."""


class Grammar(Protocol):
    """A compiled constraint."""

    def matcher(self) -> Matcher:
        """Return a new matcher at the beginning, in microseconds."""


class GrammarBackend(Protocol):
    """Compiles grammars, and asks many matchers at once."""

    def compile(self, options: ConstraintOptions) -> Grammar:
        """Compile, in any thread, in seconds at worst. Raises ConstraintRefused."""

    def fill(self, matchers: Sequence[tuple[Matcher, int]], bits: Bits) -> None:
        """Set row i of bits [M, W] to the tokens that a matcher allows next, for each (matcher, i).

        If its text may end, the bits of the vocabulary's `closing` may be set as well. The row of one that
        fails says nothing.
        """


_NO_BYTES = b""


class VocabularyError(Exception):
    """The checkpoint's tokenizer cannot be used for constraints. One line."""


class Vocabulary:
    """Tokens of a tokenizer.json. Reading takes up to a second, and holds Python's lock meanwhile.

    `width`: tokens that logits have; what is beyond the tokenizer's own is never allowed. `eos_token_ids`:
    those of the model.
    """

    def __init__(self, tokenizer_json: str, width: int, eos_token_ids: Collection[int]) -> None:
        """Raise VocabularyError."""
        self.width = width
        self.eos_token_ids = frozenset(eos_token_ids)
        self._known, added = _read(tokenizer_json)
        # Some models have fewer logits than their tokenizer has ids.
        self.size = max(width, self._known)
        try:
            self.guide = llguidance.LLTokenizer(
                tokenizer_json, n_vocab=self.size, eos_token=sorted(self.eos_token_ids) or None
            )
        except ValueError as error:
            raise VocabularyError(f"its tokenizer.json is not understood: {_line(error)}") from None
        # Tokens that a matcher allows at the end of a text.
        self.closing = frozenset(self.guide.eos_tokens)
        # Ids that no text spells, by the text that stands for each.
        self.control = {text: token for text, token in added.items() if self.guide.is_special_token(token)}
        self.control_ids = frozenset(self.control.values())
        self.bits = lru_cache(256)(self._bits)

    @property
    def words(self) -> int:
        """Length of a row of bits, in int32 words."""
        return -(-self.size // 32)

    def text(self, token_id: int) -> bytes:
        """Return the bytes of a token, those of a control token being its name."""
        return self.guide.decode_bytes([token_id]) if token_id < self._known else _NO_BYTES

    @cached_property
    def texts(self) -> list[bytes]:
        """The bytes of all tokens."""
        return [self.text(token_id) for token_id in range(self.size)]

    @cached_property
    def order(self) -> list[int]:
        """All tokens by their bytes."""
        return sorted(range(self.size), key=self.texts.__getitem__)

    @cached_property
    def logits(self) -> Bits | None:
        """The tokens that have a logit; None if all have."""
        return None if self.size == self.width else bits_of(range(self.width), self.words)

    @cached_property
    def _spelled(self) -> dict[bytes, int]:
        """A token for each text that one spells."""
        return {
            text: token for token, text in enumerate(self.texts) if text and token not in self.control_ids
        }

    def tokens(self, text: bytes) -> list[int] | None:
        """Return a few tokens that spell these bytes, in some way; None: there are none.

        Not those of the model's tokenizer, which makes control tokens of their names and changes characters.
        """
        ways: list[list[int] | None] = [[], *([None] * len(text))]
        for start in range(len(text)):
            way = ways[start]
            for end in range(start + 1, len(text) + 1) if way is not None else ():
                token, there = self._spelled.get(text[start:end]), ways[end]
                if token is not None and way is not None and (there is None or len(way) + 1 < len(there)):
                    ways[end] = [*way, token]
        return ways[-1]

    def _bits(self, token_ids: frozenset[int]) -> Bits:
        return bits_of(token_ids, self.words)


def read_vocabulary(directory: Path, width: int, eos_token_ids: Collection[int]) -> Vocabulary:
    """Return the vocabulary of a model directory. Raises VocabularyError."""
    path = directory / "tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise VocabularyError("it has no tokenizer.json that can be read") from None
    return Vocabulary(text, width, eos_token_ids)


def bits_of(token_ids: Iterable[int], words: int) -> Bits:
    """Return the set of these tokens below words * 32, int32 [words], not to be written to."""
    flat = np.zeros(words * 32, dtype=np.uint8)
    flat[[token_id for token_id in token_ids if token_id < words * 32]] = 1
    bits: Bits = np.packbits(flat, bitorder="little").view(np.int32)
    bits.flags.writeable = False
    return bits


def _read(tokenizer_json: str) -> tuple[int, dict[str, int]]:
    """Return one more than the tokenizer's highest id, and the ids of its added tokens by their text."""
    try:
        content = json.loads(tokenizer_json)
        vocab: Any = content["model"]["vocab"]
        added = {str(token["content"]): int(token["id"]) for token in content.get("added_tokens") or ()}
        # BPE has ids by token, Unigram a list of tokens.
        ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
        return 1 + max(max(ids, default=-1), max(added.values(), default=-1)), added
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise VocabularyError("its tokenizer.json has no vocabulary") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
