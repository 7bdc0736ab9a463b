"""Texts that a constraint leaves no choice of: they are themselves, whatever they spell and however."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary.constraints import ConstraintKind
from services.engine.constraints import (
    CompiledConstraint,
    GuidanceBackend,
    Restriction,
    Taken,
    Vocabulary,
    open_xgrammar,
)
from services.engine.domain import ConstraintOptions
from tests.support.constrained import WIDTH, next_tokens, regex, schema
from tests.support.tiny_tokenizer import EOS_ID, byte_ids, tokenizer_json

END = frozenset({EOS_ID})
ODD = [
    "<|im_end|>",
    "a<|im_end|>b",
    "<|im_start|>",
    "<|endoftext|>",
    "</think>",
    "<tool_call>",
    "cafe\u0301.txt",
    "caf\u00e9",
    "\u1100\u1161",
    " a  b ",
    "  ",
    "\uff21",
    "\u212b",
]


def vocabulary(normalizer: str | None) -> Vocabulary:
    file = tokenizer_json() | {"normalizer": {"type": normalizer} if normalizer else None}
    return Vocabulary(json.dumps(file), WIDTH, (EOS_ID,))


VOCABULARIES = {name: vocabulary(name) for name in (None, "NFC", "NFKC", "Lowercase")}


@pytest.fixture(params=["llguidance", "xgrammar"])
def backend(request: pytest.FixtureRequest) -> Any:
    if request.param == "xgrammar":
        pytest.importorskip("xgrammar")
        return open_xgrammar
    return GuidanceBackend


def written(one: Restriction, backend: Any, words: Vocabulary, choose: Any = min) -> str:
    """The text that a sequence gets that takes `choose(allowed)` up to the end."""
    text = b""
    for _ in range(400):
        allowed = next_tokens(one, backend, words)
        token = choose(allowed)
        taken = one.take(token)
        assert taken is not Taken.FAILED
        if taken is Taken.ENDED:
            return text.decode()
        assert token not in words.control_ids
        text += words.text(token)
    raise AssertionError("the text has no end")


def constraints(text: str) -> list[tuple[ConstraintOptions, Callable[[str], Any], Any]]:
    """Those that allow one text: how that is read, and what it reads."""
    quoted = json.dumps(text, ensure_ascii=False)
    named = {
        "type": "object",
        "properties": {text: {"const": text}},
        "required": [text],
        "additionalProperties": False,
    }
    tag = {
        "triggers": ["[f]"],
        "structures": [{"begin": "[f]", "schema": {"enum": [text]}, "end": "[/f]"}],
        "at_least_one": True,
        "stop_after_first": True,
    }
    return [
        (ConstraintOptions(ConstraintKind.GRAMMAR, f"start: {quoted}"), str, text),
        (ConstraintOptions(ConstraintKind.GBNF, f"root ::= {quoted}"), str, text),
        (regex("".join(map(_literal, text))), str, text),
        (schema({"const": text}), json.loads, text),
        (schema(named), json.loads, {text: text}),
        (
            ConstraintOptions(ConstraintKind.STRUCTURAL_TAG, json.dumps(tag)),
            lambda found: json.loads(found.removeprefix("[f]").removesuffix("[/f]")),
            text,
        ),
    ]


def _literal(char: str) -> str:
    return f"\\{char}" if char in "|./" else char


@pytest.mark.parametrize("normalizer", list(VOCABULARIES))
@pytest.mark.parametrize("text", ODD)
def test_a_forced_text_is_itself(backend: Any, normalizer: str | None, text: str) -> None:
    words = VOCABULARIES[normalizer]
    opened = backend(words, 1)
    for options, read, expected in constraints(text):
        compiled = CompiledConstraint(opened.compile(options), None, words)
        for choose in (min, max):
            assert read(written(Restriction(compiled, END), opened, words, choose)) == expected


def test_a_forced_text_behind_a_marker_is_itself(backend: Any) -> None:
    """A token that ends a marker and goes on spells the beginning of the text."""
    words = VOCABULARIES["NFC"]
    opened = backend(words, 1)
    both = 255
    assert words.text(both) == b"\n\n"
    compiled = CompiledConstraint(opened.compile(regex("\n<.im_end.>")), "\n", words)
    one = Restriction(compiled, END)
    assert one.take(both) is Taken.GOES_ON
    assert written(one, opened, words)[0] == "<"


@given(st.binary(max_size=12) | st.sampled_from([text.encode() for text in ODD]))
def test_bytes_are_spelled_by_tokens_of_text(data: bytes) -> None:
    for words in VOCABULARIES.values():
        found = words.tokens(data)
        if found is None:
            # Not every byte has a token.
            assert any(words.tokens(bytes([byte])) is None for byte in data)
            continue
        assert b"".join(map(words.text, found)) == data
        assert not set(found) & words.control_ids


LETTER = byte_ids("b")[0]


def restriction(options: ConstraintOptions, stop_ids: frozenset[int]) -> tuple[Restriction, Any, Vocabulary]:
    words = VOCABULARIES[None]
    opened = GuidanceBackend(words, 1)
    return (
        Restriction(CompiledConstraint(opened.compile(options), options.after, words), stop_ids),
        opened,
        words,
    )


@pytest.mark.parametrize("stop_ids", [END, END | {LETTER}, frozenset({LETTER})])
def test_a_stop_id_that_spells_text_ends_a_text_only_where_it_is_complete(stop_ids: frozenset[int]) -> None:
    assert written(*restriction(regex("abbb(bc)?"), stop_ids), choose=max) in ("abbb", "abbbbc")
    assert written(*restriction(schema({"enum": ["abba"]}), stop_ids), choose=max) == '"abba"'


@settings(deadline=None, max_examples=20)
@given(st.randoms(use_true_random=False), st.booleans())
def test_thoughts_before_a_marker_do_not_end_the_sequence(chance: Any, ignores: bool) -> None:
    stop_ids = frozenset({LETTER}) if ignores else END | {LETTER}
    one, opened, words = restriction(regex("[0-9]{2}", "</think>"), stop_ids)
    marker = 4
    assert words.text(marker) == b"</think>"
    for _ in range(20):
        allowed = next_tokens(one, opened, words)
        assert not set(allowed) & (words.eos_token_ids | words.closing)
        # A letter is a letter there.
        assert {LETTER, marker} <= set(allowed)
        assert one.take(chance.choice([token for token in allowed if token != marker])) is Taken.GOES_ON
        if one.active:
            return
    assert one.take(marker) is Taken.GOES_ON
    assert written(one, opened, words, chance.choice)[:2].isdecimal()


def test_the_control_token_at_the_end_of_a_tag_ends_the_text() -> None:
    """It is one of the model's ends, and a part of the text that the grammar asks for."""
    tag = {
        "triggers": ["[f]"],
        "structures": [{"begin": "[f]", "schema": {"enum": [1]}, "end": "<|im_end|>"}],
        "at_least_one": True,
        "stop_after_first": True,
    }
    options = ConstraintOptions(ConstraintKind.STRUCTURAL_TAG, json.dumps(tag))
    one, *_ = restriction(options, END)
    for token in byte_ids("[f]1"):
        assert one.take(token) is Taken.GOES_ON
    assert not one.complete
    assert one.take(EOS_ID) is Taken.ENDED
    assert one.complete
    # One that comes too early is no end.
    other, *_ = restriction(options, END)
    assert other.take(byte_ids("[")[0]) is Taken.GOES_ON
    assert other.take(EOS_ID) is Taken.FAILED
