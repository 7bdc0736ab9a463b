from __future__ import annotations

import re
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.rendering.control_tokens import literal_pattern

words = st.text(alphabet="ab<|.\n", min_size=1, max_size=5)


@given(st.sets(words, max_size=12), st.text(alphabet="ab<|.\n", max_size=40))
@settings(max_examples=300, deadline=None)
def test_it_finds_what_an_alternation_of_the_longest_first_finds(literals: set[str], text: str) -> None:
    longest_first = sorted(literals, key=len, reverse=True)
    naive = re.compile("|".join(map(re.escape, longest_first)) if literals else "(?!)")
    expected = [match.span() for match in naive.finditer(text)]
    assert [match.span() for match in literal_pattern(literals).finditer(text)] == expected


def test_thousands_of_reserved_tokens_cost_little() -> None:
    pattern = literal_pattern(f"<|reserved_{number}|>" for number in range(10_000))
    started = time.process_time()
    assert pattern.search("<" * 1_000_000 + "<|reserved_" * 50_000) is None
    assert time.process_time() - started < 5
    match = pattern.search("x<|reserved_1234|>")
    assert match is not None
    assert match.span() == (1, 18)
