"""Tokens to shown text, log probabilities and counts."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from catenary.text import Vocabulary
from gateway.streaming.delta import (
    FLOOR,
    LogprobEntry,
    SequenceText,
    TextOptions,
    TokenLogprob,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    token_name,
)
from tests.support.tiny_tokenizer import EOS_ID, byte_ids, tokenizer_json

VOCABULARY = Vocabulary(json.dumps(tokenizer_json()).encode(), sha256="x")
NAMES = TokenNames(VOCABULARY)


def text(*stops: str, min_tokens: int = 0) -> SequenceText:
    return SequenceText(VOCABULARY.detokenizer([]), TextOptions(stops, min_tokens))


def values(ids: list[int]) -> list[TokenLogprob]:
    return [TokenLogprob(-0.5 * index, (), ()) for index, _ in enumerate(ids)]


@given(st.text(alphabet="abé🌶", max_size=20), st.data())
def test_any_grouping_of_tokens_shows_the_same(content: str, data: st.DataObject) -> None:
    ids, stops = byte_ids(content), ["ab", "🌶b"]
    whole = text(*stops)
    expected = whole.feed(ids, values(ids), ended=True)
    split = text(*stops)
    entries: list[Any] = []
    shown, rest, start = "", ids, 0
    while rest and not split.stopped:
        size = data.draw(st.integers(1, len(rest)))
        piece = split.feed(rest[:size], values(ids)[start : start + size], ended=size == len(rest))
        shown, entries = shown + piece.text, [*entries, *piece.entries]
        rest, start = rest[size:], start + size
    assert shown == expected.text
    assert [entry.token_id for entry in entries] == [entry.token_id for entry in expected.entries]
    assert (split.stopped, split.tokens) == (whole.stopped, whole.tokens)


def test_tokens_after_a_match_are_neither_shown_nor_counted() -> None:
    sequence = text("STOP")
    piece = sequence.feed(byte_ids("abSTOPcd"), ended=True)
    assert (piece.text, piece.stop, piece.count, sequence.tokens) == ("ab", "STOP", 6, 6)
    assert sequence.feed(byte_ids("more")).text == ""
    assert sequence.tokens == 6


def test_log_probabilities_wait_for_their_text() -> None:
    sequence = text("lmn")
    ids = byte_ids("kl")
    first = sequence.feed(ids, values(ids))
    assert (first.text, [entry.token_id for entry in first.entries]) == ("k", ids[:1])
    ids = byte_ids("x")
    second = sequence.feed(ids, values(ids))
    assert (second.text, [entry.offset for entry in second.entries]) == ("lx", [1, 2])


def test_log_probabilities_of_cut_text_are_left_out() -> None:
    sequence = text("lm")
    ids = byte_ids("klmn")
    piece = sequence.feed(ids, values(ids), ended=True)
    assert (piece.text, [entry.token_id for entry in piece.entries]) == ("k", ids[:1])


def test_bytes_of_one_character_share_its_offset() -> None:
    ids = byte_ids("aé!")
    sequence = text()
    entries = [entry for token_id in ids for entry in sequence.feed([token_id], values([token_id])).entries]
    assert [entry.offset for entry in entries] == [0, 1, 1, 2]


def test_the_stop_token_is_counted_and_not_shown() -> None:
    sequence = text()
    ids = [*byte_ids("a"), EOS_ID]
    piece = sequence.feed(ids, values(ids), ended=True, stop_token=True)
    assert (piece.text, len(piece.entries), sequence.tokens) == ("a", 1, 2)


def test_a_visible_stop_token_is_not_shown_either() -> None:
    assert text().feed(byte_ids("ab"), ended=True, stop_token=True).text == "a"


def test_text_of_the_guaranteed_tokens_is_not_searched() -> None:
    sequence = text("b", min_tokens=2)
    piece = sequence.feed(byte_ids("abab"), ended=True)
    assert (piece.text, piece.stop, sequence.tokens) == ("aba", "b", 4)


def test_a_held_beginning_is_shown_at_the_end() -> None:
    sequence = text("STOP")
    assert sequence.feed(byte_ids("aST")).text == "a"
    assert sequence.feed([], ended=True).text == "ST"


def test_an_unfinished_character_is_flushed_with_its_log_probabilities() -> None:
    ids = byte_ids("😀")[:3]
    sequence = text()
    piece = sequence.feed(ids, values(ids), ended=True)
    assert (piece.text, len(piece.entries), sequence.tokens) == ("\ufffd", 3, 3)


def entry(token_id: int, value: float, *tops: tuple[int, float]) -> LogprobEntry:
    logprob = TokenLogprob(value, tuple(i for i, _ in tops), tuple(v for _, v in tops))
    return LogprobEntry(token_id, 0, logprob, VOCABULARY.visible_bytes(token_id) or None)


def test_chat_log_probabilities_have_bytes_and_no_infinity() -> None:
    (a,) = byte_ids("a")
    part = byte_ids("é")[0]
    content = chat_logprobs([entry(a, -0.25, (a, -0.25), (part, float("-inf")))], NAMES).content
    assert (content[0].token, content[0].bytes) == ("a", [97])
    assert [(top.token, top.logprob, top.bytes) for top in content[0].top_logprobs] == [
        ("a", -0.25, [97]),
        ("\\xc3", FLOOR, [0xC3]),
    ]


def test_completion_log_probabilities_include_the_sampled_token() -> None:
    a, b = byte_ids("ab")
    found = completion_logprobs([entry(b, -2.0, (a, -0.5))], NAMES)
    assert found.tokens == ["b"]
    assert found.top_logprobs == [{"a": -0.5, "b": -2.0}]
    assert completion_logprobs([entry(b, -2.0)], NAMES).top_logprobs is None


def test_partial_bytes_stay_unique() -> None:
    names = {token_name(bytes([value]), "bytes:") for value in range(256)}
    assert len(names) == 256
    assert float("nan") != float("nan")
    assert chat_logprobs([entry(300, float("nan"))], NAMES).content[0].logprob == FLOOR
    # No engine may make the answer something that is no number in JSON.
    assert chat_logprobs([entry(300, float("inf"))], NAMES).content[0].logprob == 0
