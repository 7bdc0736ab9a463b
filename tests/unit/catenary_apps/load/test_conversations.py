from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary_apps.load import (
    Conversation,
    PlainWords,
    Source,
    TokenizerText,
    TokenRange,
    parse_lengths,
    random_conversations,
)
from tests.support.tiny_tokenizer import write_tiny_model

IDS = TokenRange(10, 500)


def _make(count: int = 5, source: Source = IDS, **fields: object) -> list[Conversation]:
    lengths = {"prompts": parse_lengths("ratio:20:0.5"), "outputs": parse_lengths("7")}
    return random_conversations(count, source=source, **{**lengths, **fields})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TokenizerText:
    return TokenizerText.load(write_tiny_model(tmp_path_factory.mktemp("tiny")))


@given(st.integers(), st.integers(1, 30), st.integers(1, 4))
def test_conversations_follow_from_the_seed_and_their_number(seed: int, count: int, turns: int) -> None:
    made = _make(count, seed=seed, turns=turns)
    assert made == _make(count, seed=seed, turns=turns)
    assert made[: count // 2] == _make(count // 2, seed=seed, turns=turns)
    assert made != _make(count, seed=seed + 1, turns=turns)
    for conversation in made:
        assert len(conversation.turns) == turns
        for turn in conversation.turns:
            assert turn.output_tokens == 7
            assert 10 <= len(turn.prompt) <= 30
            assert all(isinstance(one, int) and 10 <= one < 500 for one in turn.prompt)


def test_prefixes_stand_before_first_prompts_and_are_shared() -> None:
    made = _make(200, prefix_tokens=50, prefixes=3, turns=2)
    heads = {conversation.turns[0].prompt[:50] for conversation in made}
    assert len(heads) == 3
    assert all(len(conversation.turns[1].prompt) <= 30 for conversation in made)
    assert len({conversation.turns[0].prompt for conversation in made}) == 200
    again = {conversation.turns[0].prompt[:50] for conversation in _make(20, prefix_tokens=50, prefixes=3)}
    assert again <= heads


@given(st.integers(), st.integers(1, 300))
def test_texts_of_a_tokenizer_have_the_length_that_was_asked_for(
    tiny: TokenizerText, seed: int, tokens: int
) -> None:
    text = tiny.make(random.Random(seed), tokens)
    assert isinstance(text, str)
    assert tiny.count(text) == tokens


def test_plain_words_are_so_many() -> None:
    words = PlainWords()
    text = words.join(words.make(random.Random(0), 5), words.make(random.Random(1), 4))
    assert isinstance(text, str)
    assert len(text.split()) == 9
    assert words.count(text) is None


def test_a_tokenizer_of_a_hub_is_taken_from_the_cache_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "models--some--model"
    tiny = write_tiny_model(tmp_path / "tiny")
    (kept / "refs").mkdir(parents=True)
    (kept / "refs/main").write_text("abc")
    (kept / "snapshots").mkdir()
    tiny.rename(kept / "snapshots/abc")
    assert TokenizerText.load("some/model").count("what is it") is not None
    for missing in ("some/other", "some/mo--del"):
        with pytest.raises(ValueError, match=f"{missing} is no file, and its tokenizer is not in the cache"):
            TokenizerText.load(missing)


def test_a_tokenizer_that_is_none_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        TokenizerText.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is not a tokenizer\.json"):
        TokenizerText.load(tmp_path)


@pytest.mark.parametrize(("low", "high"), [(5, 5), (6, 5), (-1, 5)])
def test_an_empty_range_of_ids_is_refused(low: int, high: int) -> None:
    with pytest.raises(ValueError):
        TokenRange(low, high)
