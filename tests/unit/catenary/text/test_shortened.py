"""Texts cut to a number of tokens."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from catenary.text import Vocabulary
from tests.support.tiny_tokenizer import tokenizer_json

VOCABULARY = Vocabulary(json.dumps(tokenizer_json()).encode(), sha256="x")


@given(st.text(alphabet="abc th\u00e9\u4e16", max_size=30), st.integers(1, 20))
def test_a_beginning_of_at_most_so_many_tokens(text: str, tokens: int) -> None:
    cut = VOCABULARY.shortened(text, tokens)
    assert text.startswith(cut)
    assert len(VOCABULARY.encode(cut)) <= tokens or len(cut) == 1
    assert cut or not text
    longer = text[: len(cut) + 1]
    if len(VOCABULARY.encode(text)) <= tokens:
        assert cut == text
    elif len(cut) > 1:
        assert len(VOCABULARY.encode(longer)) >= tokens
