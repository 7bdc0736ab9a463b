"""What the calls of an LLM are given: a refusal names the parameter and what is taken."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary import PoolingParams, SamplingParams
from catenary.parameters import UnknownNameError
from catenary_apps.llm.prompts import (
    GivenPrompt,
    chat_arguments,
    check_arguments,
    read_chats,
    read_one,
    read_params,
    read_prompts,
    read_texts,
)

TAKEN: list[Any] = [
    ("a", [GivenPrompt("a", "a")]),
    (["a", "b"], [GivenPrompt("a", "a"), GivenPrompt("b", "b")]),
    (("a",), [GivenPrompt("a", "a")]),
    pytest.param(iter("ab"), [GivenPrompt("a", "a"), GivenPrompt("b", "b")], id="iterator"),
    ([1, 2], [GivenPrompt([1, 2], None)]),
    ([[1, 2], [3]], [GivenPrompt([1, 2], None), GivenPrompt([3], None)]),
    (np.array([1, 2]), [GivenPrompt([1, 2], None)]),
    (np.array([[1, 2], [3, 4]]), [GivenPrompt([1, 2], None), GivenPrompt([3, 4], None)]),
    ({"prompt": "a"}, [GivenPrompt("a", "a")]),
    ({"prompt_token_ids": (1, 2)}, [GivenPrompt([1, 2], None)]),
    ({"prompt": "a", "prompt_token_ids": [1]}, [GivenPrompt([1], "a")]),
    ({"prompt": "a", "multi_modal_data": None}, [GivenPrompt("a", "a")]),
    (["a", [1], {"prompt": "b"}], [GivenPrompt("a", "a"), GivenPrompt([1], None), GivenPrompt("b", "b")]),
    ([], []),
]
WRONG_PROMPTS: list[Any] = [
    (None, "prompts must be a text, .* not None"),
    (5, "prompts must be a text, .* not int"),
    (True, "prompts must be a text, .* not bool"),
    (0.5, "prompts must be a text, .* not float"),
    (b"a", "prompts must be a text, .* not bytes"),
    (bytearray(b"a"), "prompts must be a text, .* not bytearray"),
    ({"a"}, "prompts must be a text, .* not set"),
    pytest.param(object(), "prompts must be a text, .* not object", id="object"),
    (np.array(5), "prompts must be a text, .* not ndarray"),
    ([None], r"prompts\[0\] must be a text, .* not None"),
    (["a", 5], r"prompts\[1\] must be a text, .* not int"),
    (["a", b"b"], r"prompts\[1\] must be a text, .* not bytes"),
    ([1, "a"], r"prompts\[0\] must be a text, .* not int"),
    ([0.5, 1.5], r"prompts\[0\] must be a text, .* not float"),
    ([True, False], r"prompts\[0\] must be a text, .* not bool"),
    ([["a"]], r"prompts\[0\]\[0\] must be a token id, which is an integer, not str"),
    ([[1, None]], r"prompts\[0\]\[1\] must be a token id, .* not None"),
    ([[1, True]], r"prompts\[0\]\[1\] must be a token id, .* not bool"),
    ([[[1]]], r"prompts\[0\]\[0\] must be a token id, .* not list"),
    ({"prompt": 5}, r"prompts\['prompt'\] must be a text, not int"),
    ({"prompt": ["a"]}, r"prompts\['prompt'\] must be a text, not list"),
    ({"prompt_token_ids": "a"}, r"prompts\['prompt_token_ids'\] must be a list of token ids, not str"),
    ([{"prompt_token_ids": ["a"]}], r"prompts\[0\]\['prompt_token_ids'\]\[0\] must be a token id"),
]
BAD_PROMPTS: list[tuple[Any, str]] = [
    ({}, "prompts is an object without prompt"),
    ([{}], r"prompts\[0\] is an object without prompt"),
    ({"prompt": None}, "prompts is an object without prompt"),
    ({"text": "a"}, "prompts has 'text': it must be .* prompt_token_ids"),
    ({"prompt": "a", "multi_modal_data": {"image": 1}}, "has 'multi_modal_data': models take text alone"),
    ({"prompt": "a", "cache_salt": "s"}, "has 'cache_salt'"),
    ({"prompt_embeds": [0.5]}, "has 'prompt_embeds': a prompt is a text or token ids"),
    ({"encoder_prompt": "a", "decoder_prompt": None}, "has 'encoder_prompt'"),
]
USER = {"role": "user", "content": "hi"}
WRONG_CHATS: list[tuple[Any, str]] = [
    (None, "messages must be a text or a list of messages, .* not None"),
    (5, "messages must be .* not int"),
    (b"a", "messages must be .* not bytes"),
    (USER, "messages must be .* not dict"),
    ({"a"}, "messages must be .* not set"),
    ([None], r"messages\[0\] must be a text or a list of messages, .* not None"),
    ([5], r"messages\[0\] must be .* not int"),
    ([USER, "hi"], r"messages\[1\] must be an object with role and content, not str"),
    (["hi", USER], r"messages\[0\] must be an object with role and content, not str"),
    ([USER, None], r"messages\[1\] must be an object with role and content, not None"),
    ([[USER], 5], r"messages\[1\] must be a text or a list of messages, .* not int"),
    ([[USER, 5]], r"messages\[0\]\[1\] must be an object with role and content, not int"),
    ([[[USER]]], r"messages\[0\]\[0\] must be an object with role and content, not list"),
    (["hi", b"a"], r"messages\[1\] must be .* not bytes"),
]
WRONG_TEXTS: list[Any] = [
    (None, "text_1 must be a text, or a list of texts, not None"),
    (5, "text_1 must be .* not int"),
    (b"a", "text_1 must be .* not bytes"),
    ({"text": "a"}, "text_1 must be .* not dict"),
    ({"a"}, "text_1 must be .* not set"),
    ([None], r"text_1\[0\] must be a text, not None"),
    (["a", 5], r"text_1\[1\] must be a text, not int"),
    ([["a"]], r"text_1\[0\] must be a text, not list"),
    ([b"a"], r"text_1\[0\] must be a text, not bytes"),
    pytest.param(object(), "text_1 must be .* not object", id="object"),
]
WRONG_PARAMS: list[tuple[Any, str]] = [
    ({"temperature": 0}, "sampling_params must be a SamplingParams, .* not dict"),
    (5, "sampling_params must be .* not int"),
    ("greedy", "sampling_params must be .* not str"),
    (b"", "sampling_params must be .* not bytes"),
    (PoolingParams(), "sampling_params must be .* not PoolingParams"),
    (SamplingParams, "sampling_params must be .* not type"),
    ([{"temperature": 0}, None], r"sampling_params\[0\] must be a SamplingParams or None, not dict"),
    ([None, 5], r"sampling_params\[1\] must be .* not int"),
    ([SamplingParams(), "a"], r"sampling_params\[1\] must be .* not str"),
    ([PoolingParams()], r"sampling_params\[0\] must be .* not PoolingParams"),
]


@pytest.mark.parametrize(("prompts", "expected"), TAKEN, ids=repr)
def test_prompts(prompts: Any, expected: list[GivenPrompt]) -> None:
    assert read_prompts(prompts) == expected


@pytest.mark.parametrize(("prompts", "text"), WRONG_PROMPTS, ids=repr)
def test_prompts_of_a_wrong_kind(prompts: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        read_prompts(prompts)


@pytest.mark.parametrize(("prompts", "text"), BAD_PROMPTS, ids=repr)
def test_prompts_with_parts_that_there_are_none_of(prompts: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        read_prompts(prompts)


@pytest.mark.parametrize(
    ("messages", "chats"),
    [
        ("hi", [[USER]]),
        ([USER], [[USER]]),
        ((USER, USER), [[USER, USER]]),
        ([[USER], "hi", (USER,)], [[USER], [USER], [USER]]),
        ([], []),
        ([[]], [[]]),
    ],
    ids=repr,
)
def test_chats(messages: Any, chats: Any) -> None:
    assert read_chats(messages) == chats


@pytest.mark.parametrize(("messages", "text"), WRONG_CHATS, ids=repr)
def test_chats_of_a_wrong_kind(messages: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        read_chats(messages)


@pytest.mark.parametrize(("texts", "text"), WRONG_TEXTS, ids=repr)
def test_texts_of_a_wrong_kind(texts: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        read_texts("text_1", texts)


def test_texts() -> None:
    assert read_texts("text_1", "a") == ["a"]
    assert read_texts("text_1", ("a", "b")) == ["a", "b"]
    with pytest.raises(ValueError, match=r"text_1 must be .* not an empty list"):
        read_texts("text_1", [])


@pytest.mark.parametrize(("params", "text"), WRONG_PARAMS, ids=repr)
def test_parameters_of_a_wrong_kind(params: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        read_params(SamplingParams, "sampling_params", params, 2)


def test_parameters() -> None:
    one = SamplingParams(max_tokens=1)
    assert read_params(SamplingParams, "sampling_params", None, 2) == [None, None]
    assert read_params(SamplingParams, "sampling_params", one, 2) == [one, one]
    assert read_params(SamplingParams, "sampling_params", (one, None), 2) == [one, None]
    with pytest.raises(ValueError, match="there are 3 prompts and 1 sampling_params"):
        read_params(SamplingParams, "sampling_params", [one], 3)
    bad: list[Any] = [None, {}, one, [PoolingParams()]]
    for wrong in bad:
        with pytest.raises(TypeError, match="pooling_params must be a PoolingParams, not "):
            read_one(PoolingParams, "pooling_params", wrong)


def test_arguments_of_vllm_that_ask_for_nothing() -> None:
    check_arguments("generate", {"lora_request": None, "priority": None, "tokenization_kwargs": None})
    check_arguments("generate", {"chat_template_content_format": "auto"})
    with pytest.raises(ValueError, match=r"LLM.generate has no lora_request: LoRA adapters are not done yet"):
        check_arguments("generate", {"lora_request": object()})
    with pytest.raises(UnknownNameError, match=r"LLM.generate has no argument 'lora_reqest' .did you mean"):
        check_arguments("generate", {"lora_reqest": None})


def test_arguments_of_chats_are_those_that_a_template_sees() -> None:
    """A temperature beside the messages was once read and ignored."""
    seen = {"tools": [], "add_generation_prompt": True, "chat_template_kwargs": {"a": 1}}
    asked = {**seen, "lora_request": None, "chat_template_content_format": "auto"}
    assert chat_arguments(asked) == seen
    for wrong, text in (
        ({"temperature": 0}, r"no argument 'temperature': it is one of SamplingParams\(temperature=...\)"),
        ({"max_tokens": 5}, r"it is one of SamplingParams\(max_tokens"),
        ({"tool_choice": "required"}, "no argument 'tool_choice'"),
        ({"stream": True}, "no argument 'stream'"),
        ({"tool": []}, r"no argument 'tool' \(did you mean 'tools'"),
        ({"chat_template_content_format": "string"}, "has no chat_template_content_format: a message's"),
        ({"lora_request": 1}, "has no lora_request"),
        ({"model": "other"}, "no argument 'model'"),
        ({"response_format": {"type": "json_object"}}, "no argument 'response_format'"),
        ({"n": 2}, r"it is one of SamplingParams\(n=...\)"),
    ):
        with pytest.raises(ValueError, match=f"LLM.chat has {text}" if text.startswith("no ") else text):
            chat_arguments(wrong)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


@given(ANY)
def test_whatever_is_given_is_read_or_refused_by_name(value: Any) -> None:
    for name, read in (
        ("prompts", read_prompts),
        ("messages", read_chats),
        ("text_1", lambda given: read_texts("text_1", given)),
    ):
        refusal = ""
        try:
            assert isinstance(read(value), list)
        except (TypeError, ValueError) as error:
            refusal = str(error)
        assert not refusal or re.match(rf"{name}[\[ ]", refusal)
