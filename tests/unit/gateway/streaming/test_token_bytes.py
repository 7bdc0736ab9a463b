"""Bytes of log probabilities, joined, are the text: at cuts, inside of characters, around hidden tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from catenary.text import Vocabulary
from gateway.streaming.delta import Echo, LogprobEntry, Piece, SequenceText, TextOptions, TokenLogprob
from tests.support.tiny_tokenizer import (
    EOS_ID,
    FIRST_BYTE_ID,
    IM_START_ID,
    THINK_ID,
    byte_id,
    byte_ids,
    tokenizer_json,
)

VOCABULARY = Vocabulary(json.dumps(tokenizer_json()).encode(), sha256="x")
LOGPROB = TokenLogprob(-1.0, (), ())
# Pieces of characters, whole ones, letters with a space, two newlines, control tokens that are hidden.
TOKENS = st.one_of(
    st.sampled_from([*byte_ids("abSTOP 🌶é"), 7, 8, 255, EOS_ID, IM_START_ID, THINK_ID]),
    st.integers(FIRST_BYTE_ID, FIRST_BYTE_ID + 255),
)
STOPS = st.lists(st.sampled_from(["ab", "STOP", "🌶", "é", "b🌶", " ", "a", "\ufffd", "\n"]), max_size=3)


def run(
    sequence: SequenceText, ids: Sequence[int], sizes: Sequence[int], *, stop_token: bool = False
) -> tuple[str, list[LogprobEntry], list[Piece]]:
    text, entries, pieces, rest = "", list[LogprobEntry](), list[Piece](), list(ids)
    for size in [*sizes, len(ids)]:
        part, rest = rest[:size], rest[size:]
        piece = sequence.feed(
            part, [LOGPROB] * len(part), ended=not rest, stop_token=stop_token and not rest and bool(part)
        )
        text, entries = text + piece.text, [*entries, *piece.entries]
        pieces.append(piece)
        if not rest or sequence.stopped:
            break
    return text, entries, pieces


def joined(entries: Sequence[LogprobEntry]) -> str:
    return b"".join(entry.data or b"" for entry in entries).decode("utf-8", "replace")


@given(
    st.lists(TOKENS, max_size=12),
    st.lists(TOKENS, max_size=12),
    STOPS,
    st.booleans(),
    st.lists(st.integers(0, 4), max_size=8),
)
@example(byte_ids("🌶")[:2], byte_ids("🌶")[2:], [], False, [1])
@example([], [byte_id(0xF0), *byte_ids("a")], ["a"], False, [])
@example([], byte_ids("x🌶"), ["🌶"], False, [2])
def test_bytes_joined_are_the_text(
    prompt: list[int], ids: list[int], stops: list[str], include: bool, sizes: list[int]
) -> None:
    options = TextOptions(stops, include_stop=include)
    text, entries, pieces = run(SequenceText(VOCABULARY.detokenizer(prompt), options), ids, sizes)
    assert joined(entries) == text
    whole, same, _ = run(SequenceText(VOCABULARY.detokenizer(prompt), options), ids, [])
    assert (whole, same) == (text, entries)
    assert sum(piece.count for piece in pieces) <= len(ids)
    offsets = [entry.offset for entry in entries]
    assert offsets == sorted(offsets)
    assert all(offset <= len(text) for offset in offsets)


@given(st.lists(TOKENS, min_size=1, max_size=12), st.lists(TOKENS, max_size=12))
def test_an_echo_and_its_choice_are_one_text(prompt: list[int], ids: list[int]) -> None:
    echo = Echo(VOCABULARY.detokenizer([]), prompt)
    sequence = SequenceText(echo.detokenizer(), TextOptions(), len(echo.text))
    text, entries, _ = run(sequence, ids, [])
    assert echo.text + text == VOCABULARY.decode([*prompt, *ids])
    first = echo.entries([LOGPROB] * (len(prompt) - 1))
    assert [entry.logprob for entry in first] == [None] + [LOGPROB] * (len(prompt) - 1)
    everything = [*first, *entries]
    assert joined(everything) == echo.text + text
    assert [entry.token_id for entry in everything] == [*prompt, *ids]
    again = SequenceText(echo.detokenizer(), TextOptions(), len(echo.text))
    assert run(again, ids, [])[0] == text


def test_a_token_that_a_stop_string_cuts_keeps_its_first_bytes() -> None:
    (newlines,) = VOCABULARY.encode("\n\n")
    for stop, include, shown in (("\n", False, ""), ("\n", True, "\n"), ("\n\n", False, "")):
        sequence = SequenceText(VOCABULARY.detokenizer([]), TextOptions([stop], include_stop=include))
        text, entries, _ = run(sequence, [*byte_ids("a"), newlines], [])
        assert text == "a" + shown
        assert [entry.data for entry in entries] == [b"a", *([b"\n"] if shown else [])]


def test_hidden_tokens_have_no_bytes_and_shown_ones_have() -> None:
    ids = [IM_START_ID, *byte_ids("a")]
    _, hidden, _ = run(SequenceText(VOCABULARY.detokenizer([]), TextOptions()), ids, [])
    assert [entry.data for entry in hidden] == [None, b"a"]
    shown = VOCABULARY.detokenizer([], shown=VOCABULARY.special_ids)
    text, entries, _ = run(SequenceText(shown, TextOptions()), ids, [])
    assert (text, entries[0].data) == ("<|im_start|>a", b"<|im_start|>")


def test_the_stop_token_is_scored_or_shown_on_demand() -> None:
    ids = byte_ids("ab")
    plain = SequenceText(VOCABULARY.detokenizer([]), TextOptions())
    assert len(run(plain, ids, [], stop_token=True)[1]) == 1
    scored = SequenceText(VOCABULARY.detokenizer([]), TextOptions(scores_stop_token=True))
    text, entries, _ = run(scored, ids, [], stop_token=True)
    assert (text, [entry.data for entry in entries]) == ("a", [b"a", None])
    included = SequenceText(VOCABULARY.detokenizer([]), TextOptions(include_stop=True))
    assert run(included, ids, [], stop_token=True)[0] == "ab"
    hidden = SequenceText(VOCABULARY.detokenizer([]), TextOptions(include_stop=True))
    assert run(hidden, [*byte_ids("a"), EOS_ID], [], stop_token=True)[0] == "a"
