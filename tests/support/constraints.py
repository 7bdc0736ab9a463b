"""Constraints as languages: which texts a compiled grammar allows, with a vocabulary of single bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from catenary.constraints import (
    DEFAULT_LIMITS,
    ConstraintError,
    ConstraintKind,
    ConstraintLimits,
    check_grammar,
    parser_limits,
    to_llguidance,
)

EOS = 256
CONTROL = {"<|call|>": 257, "<|end|>": 258}


class _Bytes:
    """A tokenizer whose tokens are the bytes, an end, and the control tokens."""

    eos_token_id = EOS
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>", b"<|call|>", b"<|end|>")
    special_token_ids = (EOS, *CONTROL.values())

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


BYTES = LLTokenizer(TokenizerWrapper(_Bytes()))


class Language:
    """The texts that a constraint allows. Raises ConstraintError for one that is refused."""

    def __init__(
        self,
        kind: ConstraintKind,
        source: Any,
        control: Mapping[str, int] | None = None,
        *,
        closed: bool = False,
        limits: ConstraintLimits = DEFAULT_LIMITS,
    ) -> None:
        text = source if isinstance(source, str) else json.dumps(source, ensure_ascii=False)
        self._grammar = to_llguidance(kind, text, limits, control, closed=closed)
        check_grammar(self._grammar, BYTES)

    def __contains__(self, text: str | list[str | int]) -> bool:
        """Of a list, numbers are ids of control tokens."""
        ids: list[int] = []
        for piece in [text] if isinstance(text, str) else text:
            ids += list(piece.encode()) if isinstance(piece, str) else [piece]
        matcher = LLMatcher(BYTES, self._grammar, log_level=0, limits=parser_limits())
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def sample(self, choose: Any, most: int = 400) -> str | None:
        """A text of the language, whose bytes `choose(allowed ids)` chose; None: it got too long."""
        matcher = LLMatcher(BYTES, self._grammar, log_level=0, limits=parser_limits())
        data = bytearray()
        while len(data) < most:
            mask = matcher.compute_logit_bias()
            assert not matcher.is_error(), matcher.get_error()
            allowed = [token for token in range(257) if mask[token]]
            assert allowed, "nothing is allowed"
            token = choose(allowed)
            if token == EOS:
                return data.decode()
            assert matcher.consume_token(token)
            data.append(token)
        return None


def refusal(kind: ConstraintKind, source: Any) -> str:
    """The one short line by which a constraint is refused."""
    with pytest.raises(ConstraintError) as caught:
        Language(kind, source, CONTROL)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 250
    return text
