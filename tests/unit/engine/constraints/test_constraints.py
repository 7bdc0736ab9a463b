"""Vocabularies, markers and matchers of constraints, without an engine around them."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary.constraints import ConstraintKind
from services.engine.constraints import (
    Bits,
    CompiledConstraint,
    ConstraintCompiler,
    ConstraintRefused,
    GuidanceBackend,
    Restriction,
    Taken,
    Vocabulary,
    VocabularyError,
    open_xgrammar,
)
from services.engine.constraints.vocabulary import bits_of
from services.engine.domain import ConstraintOptions
from services.engine.scheduler import QueueFull
from tests.support.constrained import WIDTH, regex, schema, tiny_vocabulary
from tests.support.tiny_tokenizer import EOS_ID, VOCAB_SIZE, byte_ids, tokenizer_json

WAIT_S = 60.0
VOCABULARY = tiny_vocabulary()
BACKEND = GuidanceBackend(VOCABULARY, 2)
END = frozenset({EOS_ID})


def restriction(constraint: ConstraintOptions, stop_ids: frozenset[int] = END) -> Restriction:
    compiled = CompiledConstraint(BACKEND.compile(constraint), constraint.after, VOCABULARY)
    return Restriction(compiled, stop_ids)


def allowed(one: Restriction, *, mask_stops: bool = False) -> set[int]:
    """What may be sampled next."""
    bits: Bits = np.zeros((1, VOCABULARY.words), dtype=np.int32)
    if one.active:
        BACKEND.fill([(one.matcher, 0)], bits)
    one.narrow(bits[0], mask_stops=mask_stops)
    flat = np.unpackbits(bits.view(np.uint8), axis=1, count=WIDTH, bitorder="little")
    return set(np.nonzero(flat[0])[0].tolist())


@pytest.mark.parametrize(
    ("gap", "allowed_there"),
    [
        ("", True),
        ("\n", True),
        (" ", True),
        (" \n", True),
        ("\n\n", True),
        ("\n\n\n", False),
        (",", False),
        ("x", False),
    ],
)
def test_between_two_tags_both_libraries_allow_the_same(gap: str, allowed_there: bool) -> None:
    tags = {
        "triggers": ["<f"],
        "structures": [
            {"begin": f"<f{name}>", "schema": {"type": "boolean"}, "end": "</f>"} for name in "ab"
        ],
        "at_least_one": True,
        "only_tags": True,
    }
    text = byte_ids(f"<fa>true</f>{gap}<fb>false</f>")
    for opened in (BACKEND, open_xgrammar(VOCABULARY, 1)):
        for single in (False, True):
            options = ConstraintOptions(
                ConstraintKind.STRUCTURAL_TAG, json.dumps({**tags, "stop_after_first": single})
            )
            matcher = opened.compile(options).matcher()
            assert matcher.accept(byte_ids("<fa>true</f>"))
            followed = opened.compile(options).matcher().accept(text)
            assert followed is (allowed_there and not single)


def test_a_vocabulary_has_the_width_of_the_logits() -> None:
    assert (VOCABULARY.size, VOCABULARY.words) == (WIDTH, -(-WIDTH // 32))
    assert VOCABULARY.text(byte_ids("x")[0]) == b"x"
    assert VOCABULARY.text(4) == b"</think>"
    assert VOCABULARY.texts[VOCAB_SIZE:] == [b""] * (WIDTH - VOCAB_SIZE)
    # More ids than logits: what has no logit is never allowed.
    narrow = Vocabulary(json.dumps(tokenizer_json()), 300, (EOS_ID,))
    assert narrow.size == VOCAB_SIZE
    backend = GuidanceBackend(narrow, 1)
    compiled = CompiledConstraint(backend.compile(regex("[a-z ]+")), None, narrow)
    bits: Bits = np.zeros((1, narrow.words), dtype=np.int32)
    one = Restriction(compiled, END)
    backend.fill([(one.matcher, 0)], bits)
    one.narrow(bits[0], mask_stops=False)
    flat = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[0]
    assert flat[:300].any()
    assert not flat[300:].any()


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"model": {}}', '{"model": {"vocab": {"a": "b"}}}'])
def test_a_file_that_is_no_tokenizer_is_refused(text: str) -> None:
    with pytest.raises(VocabularyError) as refusal:
        Vocabulary(text, 10, (2,))
    assert "\n" not in str(refusal.value)


@given(st.sets(st.integers(0, WIDTH - 1)))
def test_sets_of_tokens_are_bits(tokens: set[int]) -> None:
    bits = bits_of(tokens, VOCABULARY.words)
    assert {t for t in range(WIDTH) if bits[t // 32] >> t % 32 & 1} == tokens


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_what_is_allowed_always_leads_to_a_match(data: st.DataObject) -> None:
    pattern = data.draw(st.sampled_from(["(ab|a[0-9]+|é{2,3})x?", "[a-f ]{3,9}", "a*b", "(the|then) end"]))
    stop_ids = data.draw(st.sampled_from([END, frozenset[int](), frozenset({EOS_ID, byte_ids("a")[0]})]))
    mask_stops = data.draw(st.booleans())
    one = restriction(regex(pattern), stop_ids)
    text = b""
    for _ in range(40):
        tokens = sorted(allowed(one, mask_stops=mask_stops))
        assert tokens
        assert not set(tokens) & (VOCABULARY.closing - {EOS_ID})
        token = data.draw(st.sampled_from(tokens))
        taken = one.take(token)
        assert taken is not Taken.FAILED
        if taken is Taken.ENDED:
            assert re.fullmatch(pattern, text.decode())
            return
        text += VOCABULARY.text(token)


def test_control_tokens_are_no_text() -> None:
    for pattern in ("(.|\\n)*", "<.*"):
        one = restriction(regex(pattern))
        assert allowed(one) & set(VOCABULARY.control.values()) <= END
        one.take(byte_ids("<")[0])
        assert allowed(one) & set(VOCABULARY.control.values()) <= END


@settings(deadline=None, max_examples=80)
@given(
    st.text("abe\n", max_size=12), st.sampled_from(["e", "ab", "aba", "abab", "</think>", "\n"]), st.data()
)
def test_a_constraint_begins_behind_the_first_marker(text: str, marker: str, data: st.DataObject) -> None:
    one = restriction(regex("[0-9]{2}", marker))
    seen = b""
    # The text, then the marker, in whatever tokens.
    rest = text.encode() + marker.encode()
    while rest:
        fits = [
            token
            for token in allowed(one)
            if VOCABULARY.texts[token] and rest.startswith(VOCABULARY.texts[token])
        ]
        token = data.draw(st.sampled_from(sorted(fits)))
        was_active = one.active
        assert one.take(token) is Taken.GOES_ON
        seen += VOCABULARY.texts[token]
        rest = rest[len(VOCABULARY.texts[token]) :]
        assert one.active == (marker.encode() in seen)
        if one.active and not was_active:
            break
    assert one.active
    digits = set(byte_ids("0123456789"))
    assert allowed(one) == digits
    # No token may have said anything behind the marker that is not of the language.
    assert seen.partition(marker.encode())[2] == b""


def test_what_a_token_says_behind_the_marker_counts() -> None:
    two_lines = 255
    assert VOCABULARY.text(two_lines) == b"\n\n"
    one = restriction(regex("\\n[0-9]", "\n"))
    assert two_lines in allowed(one)
    assert one.take(two_lines) is Taken.GOES_ON
    assert allowed(one) == set(byte_ids("0123456789"))
    other = restriction(regex("[0-9]", "\n"))
    assert two_lines not in allowed(other)
    assert byte_ids("\n")[0] in allowed(other)


def test_stop_ids_do_not_end_what_is_not_complete() -> None:
    letter = byte_ids("b")[0]
    one = restriction(regex("ab{3}c"), frozenset({EOS_ID, letter}))
    for token, expected in zip(byte_ids("abbb"), ("a", "b", "b", "b"), strict=True):
        assert allowed(one, mask_stops=True) == set(byte_ids(expected))
        assert one.take(token) is Taken.GOES_ON
    assert one.take(byte_ids("c")[0]) is Taken.GOES_ON
    assert one.complete
    assert allowed(one, mask_stops=True) == {EOS_ID, letter}
    assert one.take(letter) is Taken.ENDED


class Slow:
    """A backend whose grammars come when they are let."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def compile(self, options: ConstraintOptions) -> Any:
        assert self.go.wait(WAIT_S)
        return BACKEND.compile(options)

    def fill(self, matchers: Any, bits: Bits) -> None:
        BACKEND.fill(matchers, bits)


def test_the_queue_of_a_compiler_is_bounded_whatever_was_given_up() -> None:
    slow = Slow()
    compiler = ConstraintCompiler(slow, VOCABULARY, threads=1, queue=3, cached=2, cached_bytes=1 << 20)
    done = threading.Semaphore(0)
    futures = [compiler.compile(regex(source), done.release) for source in ("a", "b", "c")]
    assert compiler.compile(regex("a"), done.release) is futures[0]
    with pytest.raises(QueueFull, match="grammar_queue"):
        compiler.check_room()
    slow.go.set()
    for _ in futures:
        assert done.acquire(timeout=WAIT_S)
    assert compiler.find(regex("a")) is None
    assert compiler.find(regex("b")) is futures[1].result()
    assert compiler.find(regex("c")) is not None
    compiler.check_room()
    compiler.close()


def test_what_is_kept_is_bounded_in_bytes_too() -> None:
    compiler = ConstraintCompiler(BACKEND, VOCABULARY, threads=2, queue=9, cached=9, cached_bytes=250)
    small, large = regex("a" * 100), regex("b" * 200)
    for options in (small, large, regex("c" * 40)):
        compiler.compile(options, lambda: None).result(WAIT_S)
        compiler.find(options)
    assert compiler.find(small) is None
    assert compiler.find(large) is not None
    # One that is larger than all may be together is compiled, used, and not kept.
    huge = regex("d" * 300)
    assert compiler.compile(huge, lambda: None).result(WAIT_S) is not None
    assert compiler.find(huge) is None
    assert compiler.compiled == 4
    assert compiler.find(large) is None
    compiler.close()


def test_grammars_within_the_limits_do_not_exhaust_a_stack() -> None:
    deep: Any = {"type": "string", "pattern": "^(a?){500}$"}
    for _ in range(25):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    sources = ["(" * 60 + "a" + ")*" * 60, "a" * 19_000, "(x?" * 60 + "y" + ")" * 60, "(a?){9000}"]
    compiler = ConstraintCompiler(BACKEND, VOCABULARY, threads=1, queue=9, cached=9, cached_bytes=1 << 20)
    for options in (*map(regex, sources), schema(deep)):
        try:
            compiled = compiler.compile(options, lambda: None).result(WAIT_S)
        except ConstraintRefused:
            continue
        matchers = [(compiled.grammar.matcher(), row) for row in range(3)]
        bits: Bits = np.zeros((3, VOCABULARY.words), dtype=np.int32)
        for _ in range(3):
            BACKEND.fill(matchers, bits)
            token = int(np.nonzero(np.unpackbits(bits[:1].view(np.uint8), bitorder="little"))[0][-1])
            for matcher, _row in matchers:
                matcher.accept([token])
    compiler.close()
