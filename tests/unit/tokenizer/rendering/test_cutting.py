"""The law of parts: what is tokenized of a long text gives the ids that tokenizing all and cutting gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from services.tokenizer.rendering import (
    ChatOptions,
    ChatTurn,
    ModelFiles,
    PairRenderer,
    PromptLimits,
    Renderer,
    TextPair,
    cutting,
)
from tests.support import tiny_tokenizer as tiny
from tests.support.repository import DATA

PROSE = (DATA / "prose.txt").read_text()
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SPECIAL = ["<s>", "</s>", "<unk>"]
TEMPLATE = "{% for m in messages %}<s>{{ m.role }} {{ m.content }}</s>{% endfor %}"


def trained(tokenizer: Tokenizer, trainer: Any) -> Tokenizer:
    tokenizer.train_from_iterator(PROSE.splitlines(keepends=True), trainer)
    return tokenizer


def byte_level(*, regex: str | None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    steps: list[Any] = [pre_tokenizers.Split(Regex(regex), "isolated")] if regex else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1200, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    return trained(tokenizer, trainer)


def metaspace(*, split: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    tokenizer.decoder = decoders.Metaspace()
    trained(tokenizer, trainers.BpeTrainer(vocab_size=1200, special_tokens=SPECIAL, show_progress=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=split)
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=600, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    return trained(tokenizer, trainer)


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return trained(
        tokenizer, trainers.WordPieceTrainer(vocab_size=800, special_tokens=SPECIAL, show_progress=False)
    )


def framed(tokenizer: Tokenizer) -> bytes:
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return str(tokenizer.to_str()).encode()


MADE: dict[str, Callable[[], bytes]] = {
    "tiny": lambda: json.dumps(tiny.tokenizer_json()).encode(),
    "gpt2": lambda: framed(byte_level(regex=None)),
    "llama3": lambda: framed(byte_level(regex=LLAMA3)),
    "metaspace": lambda: framed(metaspace(split=True)),
    "llama2": lambda: framed(metaspace(split=False)),
    "unigram": lambda: framed(unigram()),
    "bert": lambda: framed(word_piece()),
}


@pytest.fixture(scope="module", params=list(MADE))
def renderer(request: pytest.FixtureRequest) -> Renderer:
    files = ModelFiles(MADE[request.param](), TEMPLATE, {}, None)
    return Renderer(files, max_rendered_chars=10_000_000)


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of tests are long."""
    monkeypatch.setattr(cutting, "_LEAST", 16)
    monkeypatch.setattr(cutting, "_PACE", 1)


words = st.sampled_from(
    [
        *(
            "the",
            " of",
            "a b",
            " c d",
            " ",
            "  ",
            "\n",
            "\n\n",
            "'s",
            "1234",
            ".",
            "<",
            "\t",
            " x y z",
            "ab" * 20,
        ),
        *("\u00e9", "e\u0301", "\u0301", "\u4e2d", "<s>", "</s>", "\u2581", "\u0120", "\u03a3", "\U0001f642"),
        *("a\u200db", "I'll be there"),
    ]
)
TEXTS = st.lists(words, max_size=120).map("".join) | st.integers(0, 20_000).map(
    lambda start: PROSE[start : start + 900]
)
LAW = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(TEXTS, st.integers(1, 60))
@LAW
def test_parts_have_the_tokens_of_the_whole(renderer: Renderer, text: str, count: int) -> None:
    encode = renderer.vocabulary.encode
    whole = encode(text, add_special_tokens=False)
    head, tail = renderer.vocabulary.cutter.head(text, count), renderer.vocabulary.cutter.tail(text, count)
    first, last = encode(head, add_special_tokens=False), encode(tail, add_special_tokens=False)
    assert first == whole[: len(first)]
    assert last == whole[len(whole) - len(last) :]
    assert min(len(first), len(last)) >= min(count, len(whole))


@given(TEXTS, st.integers(1, 60), st.booleans())
@LAW
def test_prompts_are_cut_as_if_all_had_been_tokenized(
    renderer: Renderer, text: str, keep: int, special: bool
) -> None:
    whole = renderer.vocabulary.encode(text, add_special_tokens=special)
    if not whole:
        return
    (ids,) = renderer.completion([text], add_special_tokens=special, limits=PromptLimits(truncate_to=keep))
    assert ids == whole[-keep:]
    turns = [ChatTurn("user", text)]
    chat = renderer.chat(turns, ChatOptions())
    assert renderer.chat(turns, ChatOptions(), PromptLimits(truncate_to=keep)).ids == chat.ids[-keep:]
    (ids,) = renderer.completion([text], add_special_tokens=special, limits=PromptLimits(first_tokens=keep))
    after = len(whole) - len(renderer.vocabulary.encode(text, add_special_tokens=False))
    assert ids[:keep] == whole[:keep] or len(ids) == len(whole)
    assert not after or ids[-1] == whole[-1]


def test_of_a_long_text_little_is_tokenized(renderer: Renderer) -> None:
    text = PROSE * 4
    assert len(renderer.vocabulary.cutter.head(text, 50)) < 1000
    assert len(renderer.vocabulary.cutter.tail(text, 50)) < 1000
    # Nowhere to cut: all of it.
    assert renderer.vocabulary.cutter.head("ab" * 3000, 50) == "ab" * 3000
    assert renderer.vocabulary.cutter.tail("ab" * 3000, 50) == "ab" * 3000


def test_a_second_text_is_cut_as_if_all_had_been_tokenized(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = PairRenderer(renderer, instruction="judge")
    found = []
    for least in (16, 1 << 30):
        monkeypatch.setattr(cutting, "_LEAST", least)
        found.append(
            [
                pairs.render([TextPair("a question", PROSE[start:])], PromptLimits(truncate_to=keep))
                for start in (0, 777, 4000)
                for keep in (300, 301, 302, 350)
            ]
        )
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "change",
    [
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": "(?<=a) "},
                "behavior": "Isolated",
                "invert": False,
            }
        },
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": "[a-z]+ ?[a-z]+"},
                "behavior": "Isolated",
                "invert": False,
            }
        },
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "a b"}, "content": "c"}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "n"}, "content": " "}},
    ],
)
def test_other_tokenizers_get_the_whole_text(change: dict[str, Any]) -> None:
    files = ModelFiles(json.dumps(tiny.tokenizer_json() | change).encode(), None, {}, None)
    cutter = Renderer(files, max_rendered_chars=1000).vocabulary.cutter
    assert cutter.head(PROSE, 5) == cutter.tail(PROSE, 5) == PROSE


def test_a_token_of_two_words_is_cut_in_no_place() -> None:
    document = json.loads(framed(metaspace(split=False)))
    document["model"]["vocab"]["a\u2581b"] = 1200
    cutter = Renderer(
        ModelFiles(json.dumps(document).encode(), None, {}, None), max_rendered_chars=1000
    ).vocabulary.cutter
    assert cutter.head(PROSE, 5) == cutter.tail(PROSE, 5) == PROSE
