"""BOS, context limits, ids to text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.tokenizer.rendering import (
    ChatOptions,
    ChatTurn,
    PromptLimits,
    RefusalCode,
    Renderer,
    RenderRefused,
    read_model_files,
)
from services.tokenizer.rendering.cutting import token_bound
from services.tokenizer.rendering.files import ModelFiles
from tests.support import tiny_tokenizer as tiny

BOS = tiny.ENDOFTEXT_ID
A = tiny.byte_id(ord("a"))


def renderer_of(directory: Path, **options: Any) -> Renderer:
    return Renderer(
        read_model_files(tiny.write_tiny_model(directory, **options)), max_rendered_chars=10_000_000
    )


def with_add_bos(renderer_dir: Path, value: bool, *, add_bos: bool) -> Renderer:
    tiny.write_tiny_model(renderer_dir, add_bos=add_bos)
    path = renderer_dir / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"bos_token": "<|endoftext|>", "add_bos_token": value}))
    return Renderer(read_model_files(renderer_dir), max_rendered_chars=1000)


@pytest.mark.parametrize(
    ("text", "add_special", "expected"),
    [
        ("a", True, [BOS, A]),
        ("a", False, [A]),
        ("<|endoftext|>a", True, [BOS, A]),
        ("<|endoftext|>a", False, [BOS, A]),
        ("<|endoftext|><|endoftext|>a", True, [BOS, BOS, A]),
        ("", True, [BOS]),
        ("", False, []),
    ],
)
def test_bos_is_added_once(tmp_path: Path, text: str, add_special: bool, expected: list[int]) -> None:
    assert renderer_of(tmp_path, add_bos=True).tokenize(text, add_special_tokens=add_special) == expected


def test_the_configuration_decides_about_bos(tmp_path: Path) -> None:
    off = with_add_bos(tmp_path / "off", False, add_bos=True)
    on = with_add_bos(tmp_path / "on", True, add_bos=False)
    assert off.tokenize("a", add_special_tokens=True) == [A]
    assert on.tokenize("a", add_special_tokens=True) == [BOS, A]
    assert on.tokenize("<|endoftext|>a", add_special_tokens=True) == [BOS, A]


def refused(renderer: Renderer, text: str, limit: int) -> RenderRefused:
    with pytest.raises(RenderRefused) as caught:
        renderer.completion([text], add_special_tokens=True, limits=PromptLimits(limit))
    return caught.value


def test_a_prompt_may_have_as_many_tokens_as_fit(tmp_path: Path) -> None:
    renderer = renderer_of(tmp_path)
    assert renderer.completion(["xyz"], add_special_tokens=True, limits=PromptLimits(3))
    error = refused(renderer, "wxyz", 3)
    assert error.code is RefusalCode.CONTEXT_LENGTH_EXCEEDED
    assert error.param == "prompt"
    assert error.message == "The prompt has 4 tokens, but at most 3 fit."


def test_what_is_certainly_too_long_is_refused_by_its_length(tmp_path: Path) -> None:
    renderer = renderer_of(tmp_path)
    longest = len("<|endoftext|>")
    assert refused(renderer, "a" * 10_000, 100).message == (
        f"The prompt has at least {-(-10_000 // longest)} tokens, but at most 100 fit."
    )
    with pytest.raises(RenderRefused, match="at least") as caught:
        renderer.chat([ChatTurn("user", "<|im_end|>" * 10_000)], ChatOptions(), PromptLimits(100))
    assert caught.value.param == "messages"


def test_an_answer_holds_so_many_tokens_and_no_more(tmp_path: Path) -> None:
    files = read_model_files(tiny.write_tiny_model(tmp_path))
    renderer = Renderer(files, max_rendered_chars=10_000, max_answer_tokens=4)
    assert len(renderer.tokenize("wxyz", add_special_tokens=False)) == 4
    assert renderer.completion(["wx", "yz"], add_special_tokens=False)

    def tokenize(text: str) -> object:
        return renderer.tokenize(text, add_special_tokens=False)

    def complete(*prompts: str) -> object:
        return renderer.completion(prompts, add_special_tokens=False)

    for call, count in (
        (lambda: tokenize("vwxyz"), "5"),
        (lambda: tokenize("a" * 10_000), "at least"),
        (lambda: complete("wx", "xyz"), "5"),
        (lambda: renderer.chat([ChatTurn("user", "vwxyz")], ChatOptions()), "tokens"),
    ):
        with pytest.raises(RenderRefused, match=rf"{count}.*at most 4 \(max-answer-tokens\)") as caught:
            call()
        assert caught.value.code is RefusalCode.INVALID_ARGUMENT


def test_a_text_that_would_take_too_long_is_refused_before_it_is_tokenized(tmp_path: Path) -> None:
    files = read_model_files(tiny.write_tiny_model(tmp_path))
    renderer = Renderer(files, max_rendered_chars=10_000_000, max_seconds=1e-4)
    text = "ab" * 500_000
    for call, param in (
        (lambda: renderer.tokenize(text, add_special_tokens=False), "text"),
        (lambda: renderer.completion([text], add_special_tokens=False), "prompt"),
        (lambda: renderer.chat([ChatTurn("user", text)], ChatOptions()), "messages"),
        (
            lambda: renderer.completion([text], add_special_tokens=False, limits=PromptLimits(truncate_to=5)),
            "prompt",
        ),
    ):
        with pytest.raises(RenderRefused, match=r"0\.0001 s \(task-timeout-s\)") as caught:
            call()
        assert (caught.value.code, caught.value.param) == (RefusalCode.INVALID_ARGUMENT, param)
    # What is cut away takes no time.
    words = "a b " * 300_000
    assert renderer.completion([words], add_special_tokens=False, limits=PromptLimits(truncate_to=5))
    slow = Renderer(files, max_rendered_chars=10_000_000, max_seconds=60)
    assert len(slow.tokenize(text, add_special_tokens=False)) == 1_000_000


@given(st.text(max_size=400))
@settings(max_examples=200, deadline=None)
def test_the_bound_never_exceeds_the_truth(text: str) -> None:
    document = json.dumps(tiny.tokenizer_json())
    bound = token_bound(document.encode())
    assert bound is not None
    assert bound.least_tokens(text) <= len(Tokenizer.from_str(document).encode(text).ids)


def test_the_bound_leaves_out_bytes_that_the_vocabulary_lacks() -> None:
    document = tiny.tokenizer_json()
    del document["model"]["vocab"]["x"]
    bound = token_bound(json.dumps(document).encode())
    assert bound is not None
    assert bound.least_tokens("x" * 10_000) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"String": "x"},
                "behavior": "Removed",
                "invert": False,
            }
        },
    ],
)
def test_no_bound_for_a_tokenizer_that_drops_text(change: dict[str, Any]) -> None:
    assert token_bound(json.dumps(tiny.tokenizer_json() | change).encode()) is None


def test_ids_must_be_tokens(tmp_path: Path) -> None:
    renderer = renderer_of(tmp_path)
    assert renderer.detokenize(tiny.byte_ids("é"), skip_special_tokens=True) == "é"
    assert renderer.detokenize([tiny.IM_END_ID, A], skip_special_tokens=True) == "a"
    assert renderer.detokenize([tiny.IM_END_ID, A], skip_special_tokens=False) == "<|im_end|>a"
    for bad in (512, 2**32 - 1, -1):
        with pytest.raises(RenderRefused, match="between 0 and 511"):
            renderer.detokenize([bad], skip_special_tokens=False)


def test_a_tokenizer_file_with_truncation_does_not_cut_prompts(tmp_path: Path) -> None:
    document = tiny.tokenizer_json()
    document["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    files = ModelFiles(json.dumps(document).encode(), None, {}, None)
    assert len(Renderer(files, max_rendered_chars=10).tokenize("wxyz", add_special_tokens=True)) == 4
