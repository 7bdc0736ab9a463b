"""Pairs of texts: as transformers puts them together, as a chat model is asked, and cut to fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from services.engine.model import prepare_model
from services.tokenizer.rendering import (
    DEFAULT_INSTRUCTION,
    ModelFiles,
    PairRenderer,
    PromptLimits,
    RefusalCode,
    Renderer,
    RenderRefused,
    TextPair,
    read_model_files,
)
from tests.support import tiny_tokenizer as tiny

PAIRS = [
    ("What is a cat?", "A cat is an animal."),
    ("naïve café", "東京 [SEP] [CLS] 🙂"),
    ("q", "w " * 40),
]
THINKING_TEMPLATE = tiny.CHATML_TEMPLATE.replace(
    "<|im_start|>assistant\n' }}{% endif %}",
    "<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}",
)


def renderer_of(files: ModelFiles, **options: Any) -> PairRenderer:
    renderer = Renderer(files, max_rendered_chars=10_000_000)
    return PairRenderer(renderer, instruction=DEFAULT_INSTRUCTION, **options)


@pytest.fixture(scope="module")
def encoder() -> Path:
    return prepare_model("minilm")


def test_pairs_of_an_encoder_equal_transformers(encoder: Path) -> None:
    reference: Any = AutoTokenizer.from_pretrained(encoder)
    pairs = renderer_of(read_model_files(encoder))
    assert pairs.available
    rendered = pairs.render([TextPair(*pair) for pair in PAIRS], PromptLimits(max_tokens=256))
    for pair, (first, second) in zip(rendered, PAIRS, strict=True):
        expected = reference(first, second)
        assert pair.ids == expected["input_ids"]
        assert pair.second_start == expected["token_type_ids"].index(1)


def test_the_second_text_is_cut(encoder: Path) -> None:
    reference: Any = AutoTokenizer.from_pretrained(encoder)
    pairs = renderer_of(read_model_files(encoder))
    first, second = PAIRS[2]
    for keep in (44, 20, 5):
        (cut,) = pairs.render([TextPair(first, second)], PromptLimits(256, keep))
        expected = reference(first, second, truncation="only_second", max_length=keep)
        assert cut.ids == expected["input_ids"]
    for limits in (PromptLimits(20), PromptLimits(256, 3)):
        with pytest.raises(RenderRefused, match="A pair of texts has") as caught:
            pairs.render([TextPair(first, second)], limits)
        assert caught.value.code is RefusalCode.CONTEXT_LENGTH_EXCEEDED


@pytest.mark.parametrize("template", [tiny.CHATML_TEMPLATE, THINKING_TEMPLATE])
def test_a_chat_model_is_asked_for_yes_or_no(template: str, tmp_path: Path) -> None:
    files = read_model_files(tiny.write_tiny_model(tmp_path, chat_template=template))
    renderer = Renderer(files, max_rendered_chars=10_000)
    pairs = PairRenderer(renderer, instruction="Find.")
    (pair,) = pairs.render([TextPair("Which <|im_end|>?", "This.")], PromptLimits())
    text = renderer.detokenize(pair.ids, skip_special_tokens=False)
    question = "<Instruct>: Find.\n<Query>: Which <|im_end|>?\n<Document>: This.<|im_end|>\n"
    assert f"<|im_start|>user\n{question}" in text
    thinking = "<think>\n\n</think>\n\n" if template is THINKING_TEMPLATE else ""
    assert text.endswith(f"<|im_start|>assistant\n{thinking}")
    assert text.startswith("<|im_start|>system\nJudge whether")
    # A spelled control token stays text.
    assert pair.ids.count(tiny.IM_END_ID) == 2
    assert pair.second_start == 0
    keep = len(pair.ids) - 2
    (cut,) = pairs.render([TextPair("Which <|im_end|>?", "This.")], PromptLimits(None, keep))
    assert len(cut.ids) <= keep
    assert renderer.detokenize(cut.ids, skip_special_tokens=False).endswith(
        f"<|im_end|>\n<|im_start|>assistant\n{thinking}"
    )


def test_a_tokenizer_without_separators_has_no_pairs(tmp_path: Path) -> None:
    files = read_model_files(tiny.write_tiny_model(tmp_path, chat_template=None))
    pairs = renderer_of(files)
    assert not pairs.available
    with pytest.raises(RenderRefused) as caught:
        pairs.render([TextPair("a", "b")], PromptLimits())
    assert caught.value.code is RefusalCode.UNSUPPORTED


def test_answers_are_bounded(encoder: Path) -> None:
    pairs = renderer_of(read_model_files(encoder), max_answer_tokens=20)
    with pytest.raises(RenderRefused, match="max-answer-tokens"):
        pairs.render([TextPair("a b c", "d e f")] * 3, PromptLimits())
