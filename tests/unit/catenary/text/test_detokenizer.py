"""Incremental decoding equals decoding at once, however a text is cut into tokens."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from catenary.text import Vocabulary, WindowDetokenizer
from tests.support.tiny_tokenizer import SPECIAL_IDS, VOCAB_SIZE, byte_id, byte_ids, tokenizer_json

TINY = Tokenizer.from_str(json.dumps(tokenizer_json()))
VOCABULARY = Vocabulary(json.dumps(tokenizer_json()).encode(), sha256="x", special_ids=SPECIAL_IDS)

all_ids = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=60)
# Mostly whole characters, cut into bytes, with odd bytes and control tokens in between.
texts = st.text(alphabet=st.sampled_from("aé世🌶\u2028 \ufffd"), max_size=12).map(byte_ids)
odd = st.lists(
    st.sampled_from([*SPECIAL_IDS, 3, byte_id(0xF0), byte_id(0x9F), byte_id(0x80), byte_id(0xFF)]), max_size=6
)
mixed_ids = st.lists(st.one_of(texts, odd), max_size=5).map(lambda parts: [i for part in parts for i in part])


def decode(ids: list[int], prompt: list[int] | None = None) -> str:
    detokenizer = VOCABULARY.detokenizer(prompt or [])
    return "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.flush()


@given(st.one_of(all_ids, mixed_ids))
def test_pushed_texts_add_up_to_the_whole_decoding(ids: list[int]) -> None:
    assert decode(ids) == TINY.decode(ids, skip_special_tokens=True)


@given(mixed_ids)
def test_nothing_is_taken_back_or_shown_early(ids: list[int]) -> None:
    detokenizer = VOCABULARY.detokenizer([])
    shown = ""
    for count, token_id in enumerate(ids, 1):
        shown += detokenizer.push(token_id)
        assert TINY.decode(ids[:count]).startswith(shown)


@given(st.text(max_size=20), st.integers(0, 4))
def test_a_prompt_that_ends_inside_a_character_is_gone_on_with(text: str, cut: int) -> None:
    ids = byte_ids(text)
    cut = min(cut, len(ids))
    prompt, rest = ids[: len(ids) - cut], ids[len(ids) - cut :]
    whole = bytes(i - byte_id(0) for i in prompt).decode(errors="ignore")
    assert whole + decode(rest, prompt) == text or not rest


def test_an_unfinished_character_of_the_prompt_is_never_repeated() -> None:
    pepper = byte_ids("🌶")
    assert decode(pepper[2:], pepper[:2]) == "🌶"
    assert decode(pepper[2:3], pepper[:2]) == "\ufffd"
    assert decode(byte_ids("A"), pepper[:2]) == "A"
    assert decode([], pepper[:2]) == ""
    assert decode([0, 1], byte_ids("x") + pepper[:3]) == ""


def test_an_unfinished_character_at_the_end_is_one_replacement() -> None:
    assert decode(byte_ids("😀")[:3]) == "\ufffd"


def test_the_real_replacement_character_is_text() -> None:
    assert decode(byte_ids("\ufffd")[2:], byte_ids("\ufffd")[:2]) == "\ufffd"


SENTENCEPIECE: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {
            "id": 0,
            "content": "<s>",
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
    ],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    },
    "model": {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": True,
        "vocab": {
            "<s>": 0,
            "▁Hello": 1,
            "▁world": 2,
            "lo": 3,
            "▁": 4,
            **{f"<0x{b:02X}>": 5 + b for b in range(256)},
        },
        "merges": [],
    },
}
PIECES = Vocabulary(json.dumps(SENTENCEPIECE).encode(), sha256="y")


GEMMA = json.loads(json.dumps(SENTENCEPIECE))
GEMMA["decoder"]["decoders"].pop()
METASPACE = json.loads(json.dumps(SENTENCEPIECE))
METASPACE["decoder"] = {
    "type": "Sequence",
    "decoders": [
        {"type": "ByteFallback"},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"},
    ],
}
FALLBACKS = [Vocabulary(json.dumps(each).encode(), sha256="y") for each in (SENTENCEPIECE, GEMMA, METASPACE)]
# Whole characters, and bytes that are none, many of them in a row.
byte_runs = st.one_of(
    st.sampled_from("é世🌶 a\ufffd").map(lambda char: [5 + byte for byte in char.encode()]),
    st.lists(st.sampled_from([0x20, 0x41, 0x80, 0x9F, 0xC3, 0xE4, 0xF0, 0xFF]), max_size=12).map(
        lambda values: [5 + value for value in values]
    ),
)
fallback_ids = st.lists(st.one_of(st.sampled_from([[1], [2], [3], [4], [0]]), byte_runs), max_size=12).map(
    lambda parts: [token_id for part in parts for token_id in part]
)


def whole(vocabulary: Vocabulary, ids: list[int]) -> str:
    """The decoding of all ids at once, with the bytes of U+FFFD in place of those that are no text: a decoder
    replaces all bytes in a row for one that is wrong."""
    valid: list[int] = []
    for single, tokens in groupby(filter(None, ids), key=lambda token_id: token_id >= 5):
        run = list(tokens)
        if single:
            text = bytes(token_id - 5 for token_id in run).decode("utf-8", "replace")
            run = [5 + byte for byte in text.encode()]
        valid += run
    return vocabulary.decode(valid)


@given(st.sampled_from(FALLBACKS), fallback_ids)
def test_vocabularies_with_byte_fallback_decode_alike(vocabulary: Vocabulary, ids: list[int]) -> None:
    detokenizer = vocabulary.detokenizer([])
    assert isinstance(detokenizer, WindowDetokenizer)
    shown, data = "", b""
    for token_id in ids:
        begun = detokenizer.begun
        text = detokenizer.push(token_id)
        assert text or not begun or detokenizer.begun or token_id == 0
        shown += text
        data += detokenizer.last_bytes(token_id, text) or b""
        detokenizer = detokenizer.fork()
    shown += detokenizer.flush()
    assert shown == whole(vocabulary, ids)
    assert data.decode("utf-8", "replace") == shown


@given(st.sampled_from(FALLBACKS), fallback_ids)
def test_text_without_broken_bytes_is_what_the_decoder_has(vocabulary: Vocabulary, ids: list[int]) -> None:
    detokenizer = vocabulary.detokenizer([])
    shown = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    if "\ufffd" not in shown:
        assert shown == vocabulary.decode(ids)


@given(st.sampled_from(FALLBACKS), fallback_ids, fallback_ids)
def test_a_text_goes_on_from_any_prompt(vocabulary: Vocabulary, prompt: list[int], ids: list[int]) -> None:
    """What it shows is the end of the whole, but for a character that the prompt began and nothing ends."""
    detokenizer = vocabulary.detokenizer(prompt)
    shown = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    if any(prompt[-6:]):
        assert whole(vocabulary, [*prompt, *ids]).endswith(shown)


def test_broken_bytes_take_back_nothing_and_characters_appear_with_their_last_byte() -> None:
    detokenizer = PIECES.detokenizer([])
    ids = [5 + byte for byte in "世🌶".encode() + b"\xff" + "é".encode()]
    assert [detokenizer.push(token_id) for token_id in ids] == [
        *("", "", "世"),
        *("", "", "", "🌶"),
        "\ufffd",
        *("", "é"),
    ]
    assert detokenizer.push(2) == " world"


def test_bytes_complete_what_the_prompt_began() -> None:
    pepper = [5 + byte for byte in "🌶".encode()]
    detokenizer = PIECES.detokenizer([1, *pepper[:2]])
    found = [detokenizer.last_bytes(token_id, detokenizer.push(token_id)) for token_id in pepper[2:]]
    assert found == ["🌶".encode()[:3], "🌶".encode()[3:]]


def test_added_tokens_in_a_row_may_stand_without_spaces() -> None:
    words = json.loads(json.dumps(SENTENCEPIECE))
    words["decoder"] = None
    added = words["added_tokens"][0]
    words["added_tokens"] = [added, {**added, "id": 261, "content": "<t>"}]
    vocabulary = Vocabulary(json.dumps(words).encode(), sha256="z")
    shown = frozenset({0, 261})
    for spaced, expected in ((True, "<s> <t> lo <s>"), (False, "<s><t> lo <s>")):
        detokenizer = vocabulary.detokenizer([], shown=shown, spaced=spaced)
        assert "".join(detokenizer.push(token_id) for token_id in (0, 261, 3, 0)) == expected


def test_a_space_after_the_prompt_is_kept() -> None:
    detokenizer = PIECES.detokenizer([0, 1])
    assert [detokenizer.push(2), detokenizer.push(3), detokenizer.flush()] == [" world", "lo", ""]


def test_endless_broken_bytes_do_not_pile_up() -> None:
    detokenizer = PIECES.detokenizer([])
    shown = [detokenizer.push(5 + 0x80) for _ in range(100)]
    assert sum(map(len, shown)) > 80


@pytest.mark.parametrize(
    ("token_id", "expected"), [(1, b" Hello"), (0, b"<s>"), (5 + 0xE4, b"\xe4"), (10_000, b"")]
)
def test_bytes_of_sentencepiece_tokens(token_id: int, expected: bytes) -> None:
    assert PIECES.token_bytes(token_id) == expected


def test_bytes_of_byte_level_tokens() -> None:
    for byte in range(256):
        assert VOCABULARY.token_bytes(byte_id(byte)) == bytes([byte])
    assert VOCABULARY.token_bytes(1) == b"<|im_start|>"
    assert VOCABULARY.visible_bytes(1) == b""
    assert VOCABULARY.token_bytes(VOCAB_SIZE) == b""


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b"[]"])
def test_what_is_no_tokenizer_file_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a tokenizer file"):
        Vocabulary(data, sha256="")
