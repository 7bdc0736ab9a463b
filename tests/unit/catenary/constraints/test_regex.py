"""Regular expressions mean what Python's `re` and ECMA-262 mean by them, character classes above all."""

from __future__ import annotations

import re
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary.constraints import ConstraintKind
from tests.support.constraints import Language, refusal

REGEX, SCHEMA = ConstraintKind.REGEX, ConstraintKind.JSON_SCHEMA
PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"


@pytest.mark.parametrize(
    "pattern",
    [
        r'^[^<>()[\].,;:\s@"]+$',
        "^[^[]$",
        "^[[]$",
        "^[][]$",
        "^[^]]$",
        "^[[(]$",
        r"^[\w[\]]$",
        r"^[(){}[\]]{1,2}$",
        "^[!-/:-@[-`{-~]$",
        "^[[a-c]x]$",
        "^[[:alpha:]]$",
        "^[a&&b]$",
        "^[&&]$",
        "^[a~~a]$",
        r"^[a\-\-b]$",
        "^[+--]$",
        "^[-a]$",
        "^[a-]$",
        "^[]-a]$",
        r"^[\b\t]$",
        r"^[\x41-\u0043\\]$",
        "^[^a-y[]z?$",
        "^[#-&]$",
        "^[ #]$",
        r"^[\d.-]$",
        r"^[^\W\d]$",
        "^[/a]$",
        "^[😀-😂]$",
    ],
)
def test_a_character_class_means_what_it_means_in_python(pattern: str) -> None:
    with warnings.catch_warnings():
        # Python warns of what it may mean some day.
        warnings.simplefilter("ignore", FutureWarning)
        judge = re.compile(pattern, re.ASCII)
    as_regex, as_pattern = Language(REGEX, pattern), Language(SCHEMA, {"type": "string", "pattern": pattern})
    in_lark = Language(ConstraintKind.GRAMMAR, f"start: /{pattern.replace('/', chr(92) + '/').strip('^$')}/")
    singles = [*PUNCTUATION, *"azAZ09xb \té😁"]
    for text in [*singles, "H]", "[]", "x]", "bx]", "aa", "()", ":]"]:
        expected = judge.fullmatch(text) is not None
        assert (text in as_regex) == expected, text
        # There word characters are Unicode's.
        assert text == "é" or (text in in_lark) == expected, text
        if '"' not in text and "\\" not in text and "\t" not in text:
            assert (f'"{text}"' in as_pattern) == expected, text


def test_halves_of_a_character_make_one() -> None:
    faces = Language(REGEX, r"[\ud83d\ude00-\ud83d\ude02]")
    assert "😁" in faces
    assert "😃" not in faces
    assert "escape" in refusal(REGEX, r"[\ud83d]")


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("[b-a]", "bad range"),
        ("[a--]", "bad range"),
        ("[a", "not closed"),
        ("[]", "not closed"),
        ("[^]", "not closed"),
        ("[a\\", "escape"),
        (r"[\y]", "escape"),
        (r"[\U00110000]", "no character"),
    ],
)
def test_classes_that_are_refused(source: str, named: str) -> None:
    assert named in refusal(REGEX, source)


MEMBERS = st.one_of(
    st.sampled_from(PUNCTUATION).filter(lambda char: char not in "\\]^-").map(str),
    st.sampled_from([r"\]", r"\\", r"\-", r"\^", r"\d", r"\w", r"\W", r"\D", r"\x41", r"\t", "é", " "]),
    st.tuples(st.characters(min_codepoint=33, max_codepoint=126), st.characters(min_codepoint=33)).map(
        lambda pair: "-".join(rf"\u{ord(char):04x}" for char in sorted(pair) if ord(char) < 0xD800)
    ),
)
CLASSES = st.tuples(
    st.sampled_from(["", "^", "-", "]", "^]"]), st.lists(MEMBERS, min_size=1, max_size=5)
).map(lambda parts: f"[{parts[0]}{''.join(parts[1])}]")


@settings(max_examples=120, deadline=None)
@given(st.lists(CLASSES, min_size=1, max_size=2), st.sampled_from(["", "+", "{2}"]), st.data())
def test_generated_classes_agree_with_python(classes: list[str], times: str, data: st.DataObject) -> None:
    source = "".join(classes) + times
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        judge = re.compile(source, re.ASCII)
    if not all(re.search(one, "".join(map(chr, range(0x3000))), re.ASCII) for one in classes):
        # Such as the word characters without all of them.
        assert "allows no text" in refusal(REGEX, source)
        return
    language = Language(REGEX, source)
    for _ in range(4):
        text = data.draw(st.text(PUNCTUATION + "aAé1 \t\n", min_size=1, max_size=4))
        assert (text in language) == (judge.fullmatch(text) is not None)
    matching = data.draw(st.from_regex(judge, fullmatch=True))
    # Halves of characters are no text.
    if matching.isprintable():
        assert matching in language
