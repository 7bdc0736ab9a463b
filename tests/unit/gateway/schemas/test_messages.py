"""Messages of every role, and the fields that a chat template sees."""

from __future__ import annotations

import json
from typing import Any

import pytest

from catenary.text import TokenizerTraits
from gateway.errors import ApiError
from gateway.generation.chat import to_chat_input
from gateway.schemas.base import RequestLimits, parse_request
from gateway.schemas.chat import ChatRequest
from tests.support.steps import counted

USER = {"role": "user", "content": "x"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
LIMITS = RequestLimits(max_documents=2, max_tool_calls=5, max_json_values=100)


def chat(*messages: Any, **fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": list(messages) or [USER], **fields}
    return parse_request(ChatRequest, body, LIMITS)


def refused(*messages: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        chat(*messages, **fields)
    assert caught.value.status == 400
    return caught.value


GOOD: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": ""}]}, ("a", "")),
    ({"role": "developer", "content": ""}, ("",)),
    ({"role": "user", "content": "a", "name": "Ann"}, ("a",)),
    ({"role": "user", "content": "a", "name": None, "tool_calls": None, "tool_call_id": None}, ("a",)),
    ({"role": "user", "content": "a", "reasoning": "", "refusal": None, "tool_calls": []}, ("a",)),
    ({"role": "assistant", "content": None, "tool_calls": [CALL]}, ()),
    ({"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": ""}}]}, ()),
    ({"role": "assistant", "content": "a", "tool_calls": [CALL, CALL], "annotations": []}, ("a",)),
    ({"role": "assistant", "tool_calls": [{**CALL, "index": 0}]}, ()),
    ({"role": "assistant", "content": None, "refusal": "no"}, ("no",)),
    ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, ("no",)),
    (
        {"role": "assistant", "content": "a", "refusal": "no", "audio": None, "function_call": None},
        ("a", "no"),
    ),
    ({"role": "assistant", "content": "a", "reasoning": "b", "reasoning_content": "b"}, ("a",)),
    ({"role": "assistant", "content": None, "reasoning_content": "b"}, ()),
    ({"role": "tool", "content": "r", "tool_call_id": "c1"}, ("r",)),
    ({"role": "tool", "content": [{"type": "text", "text": "r"}], "tool_call_id": "c1", "name": "f"}, ("r",)),
]


@pytest.mark.parametrize(("message", "texts"), GOOD, ids=[json.dumps(m)[:50] for m, _ in GOOD])
def test_good_messages(message: dict[str, Any], texts: tuple[str, ...]) -> None:
    (read,) = chat(message).messages
    assert read.texts == texts


def call(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{**CALL, **fields}]}


BAD: list[tuple[Any, str]] = [
    (None, ""),
    ("x", ""),
    ([], ""),
    ({}, "role"),
    ({"role": None, "content": "x"}, "role"),
    ({"role": "", "content": "x"}, "role"),
    ({"role": "function", "content": "x"}, "name"),
    ({"role": "function", "content": "x", "name": ""}, "name"),
    ({"role": "function", "content": "x", "name": "f", "tool_call_id": "c"}, "tool_call_id"),
    ({"role": "user", "content": "x", "function_call": {"name": "f", "arguments": ""}}, "function_call"),
    ({"role": "assistant", "function_call": {"name": "f"}}, "function_call.arguments"),
    (
        {"role": "assistant", "function_call": {"name": "f", "arguments": ""}, "tool_calls": [CALL]},
        "function_call",
    ),
    ({"role": "assistant"}, "content"),
    ({"role": "assistant", "content": None}, "content"),
    ({"role": "assistant", "content": None, "tool_calls": []}, "content"),
    ({"role": "assistant", "content": []}, "content"),
    ({"role": "system", "content": None}, "content"),
    ({"role": "tool", "tool_call_id": "c"}, "content"),
    ({"role": "tool", "content": "x"}, "tool_call_id"),
    ({"role": "tool", "content": "x", "tool_call_id": ""}, "tool_call_id"),
    ({"role": "tool", "content": "x", "tool_call_id": 5}, "tool_call_id"),
    ({"role": "tool", "content": "x", "tool_call_id": "c" * 257}, "tool_call_id"),
    ({"role": "user", "content": "x", "tool_call_id": "c"}, "tool_call_id"),
    ({"role": "user", "content": "x", "tool_calls": [CALL]}, "tool_calls"),
    ({"role": "user", "content": "x", "reasoning": "y"}, "reasoning"),
    ({"role": "system", "content": "x", "reasoning_content": "y"}, "reasoning_content"),
    ({"role": "tool", "content": "x", "tool_call_id": "c", "refusal": "no"}, "refusal"),
    ({"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}, "content"),
    ({"role": "user", "content": [{"type": "text", "refusal": "no"}]}, "content.0"),
    ({"role": "user", "content": [{"type": "refusal", "refusal": "no", "text": "x"}]}, "content.0"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "content.0"),
    ({"role": "user", "content": [{"type": 5, "text": "x"}]}, "content.0.type"),
    ({"role": "user", "content": "x", "name": "n" * 257}, "name"),
    ({"role": "assistant", "content": "x", "reasoning": "a", "reasoning_content": "b"}, "reasoning"),
    ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "audio"),
    ({"role": "assistant", "content": "x", "tool_calls": "x"}, "tool_calls"),
    ({"role": "assistant", "content": "x", "tool_calls": {}}, "tool_calls"),
    ({"role": "assistant", "content": "x", "tool_calls": [1]}, "tool_calls.0"),
    (call(id=""), "tool_calls.0.id"),
    (call(id=None), "tool_calls.0.id"),
    (call(type="custom", custom={}), "tool_calls.0"),
    (call(type=5), "tool_calls.0.type"),
    (call(function=None), "tool_calls.0.function"),
    (call(function={"name": "f"}), "tool_calls.0.function.arguments"),
    (call(function={"name": "f", "arguments": {}}), "tool_calls.0.function.arguments"),
    (call(function={"name": "", "arguments": ""}), "tool_calls.0.function.name"),
    (call(function={"name": "f" * 257, "arguments": ""}), "tool_calls.0.function.name"),
    (call(extra=1), "tool_calls.0.extra"),
    (call(index="0"), "tool_calls.0.index"),
]


@pytest.mark.parametrize(("message", "field"), BAD, ids=[json.dumps(m)[:60] for m, _ in BAD])
@pytest.mark.advisory("CVE-2025-6242")
def test_bad_messages_are_named(message: Any, field: str) -> None:
    error = refused(USER, message)
    assert error.param == ("messages.1." + field).rstrip(".")
    assert "secret" not in error.message


def test_calls_are_counted_before_they_are_looked_at() -> None:
    assert refused(*[call()] * 6).param == "messages"
    error, calls = counted(lambda: refused({"role": "assistant", "tool_calls": [{}] * 500_000}))
    assert error.param == "messages"
    assert calls < 2000


DEEP: Any = 1
for _ in range(65):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": "x"}, "documents"),
        ({"documents": ["x"]}, "documents.0"),
        ({"documents": [{}] * 3}, "documents"),
        ({"documents": [DEEP]}, "documents"),
        ({"documents": [{"a": [1] * 101}]}, "documents"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": DEEP}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": [1] * 101}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {f"v{index}": 1 for index in range(257)}}, "chat_template_kwargs"),
        ({"chat_template": ""}, "chat_template"),
        ({"chat_template": 5}, "chat_template"),
        ({"add_generation_prompt": 1}, "add_generation_prompt"),
        ({"continue_final_message": "yes"}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"add_special_tokens": "no"}, "add_special_tokens"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
    ],
)
def test_bad_template_fields(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


def variables(known: set[str], **fields: Any) -> dict[str, Any]:
    return chat(**fields).template_variables(frozenset(known))


def test_variables() -> None:
    assert variables({"enable_thinking"}, chat_template_kwargs={"enable_thinking": False}) == {
        "enable_thinking": False
    }
    # Of a template in the request only the tokenizer service knows what it reads.
    assert variables(set(), chat_template_kwargs={"x": 1}, chat_template="{{ x }}") == {"x": 1}


@pytest.mark.parametrize(
    "name", ["tokenize", "chat_template", "messages", "conversation", "__class__", "x", "é", "n" * 300]
)
@pytest.mark.advisory("CVE-2025-62426")
def test_variables_that_no_template_reads(name: str) -> None:
    with pytest.raises(ApiError) as caught:
        variables({"thinking"}, chat_template_kwargs={name: True})
    assert caught.value.status == 400
    assert str(caught.value.param).split(".")[0] == "chat_template_kwargs"
    assert len(str(caught.value.param)) < 100


@pytest.mark.parametrize(
    ("known", "effort", "expected"),
    [
        ({"reasoning_effort", "thinking"}, "low", {"reasoning_effort": "low"}),
        ({"reasoning_effort"}, "none", {"reasoning_effort": "none"}),
        ({"enable_thinking"}, "none", {"enable_thinking": False}),
        ({"enable_thinking"}, "high", {"enable_thinking": True}),
        ({"thinking"}, "none", {"thinking": False}),
        (set(), "none", {}),
    ],
)
def test_efforts(known: set[str], effort: str, expected: dict[str, Any]) -> None:
    assert variables(known, reasoning_effort=effort) == expected


def test_efforts_that_cannot_be_made() -> None:
    with pytest.raises(ApiError) as caught:
        variables({"thinking"}, reasoning_effort="none", chat_template_kwargs={"thinking": True})
    assert caught.value.param == "reasoning_effort"
    same = {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "low"}}
    assert variables({"reasoning_effort"}, **same) == {"reasoning_effort": "low"}


def test_what_the_tokenizer_service_gets() -> None:
    fields = chat(
        USER,
        {"role": "assistant", "reasoning": "hm", "tool_calls": [CALL]},
        {"role": "tool", "content": "r", "tool_call_id": "c1", "name": "f"},
        documents=[{"text": "é"}],
        reasoning_effort="low",
        add_special_tokens=True,
    )
    wire = to_chat_input(fields, TokenizerTraits(template_variables=frozenset({"reasoning_effort"})))
    asked, called, result = wire.messages
    assert not asked.HasField("reasoning")
    assert (called.reasoning, len(called.content)) == ("hm", 0)
    assert [(c.id, c.name, c.arguments) for c in called.tool_calls] == [("c1", "f", "{}")]
    assert (result.tool_call_id, result.name, result.content[0].text) == ("c1", "f", "r")
    assert json.loads(wire.documents_json) == [{"text": "é"}]
    assert json.loads(wire.template_variables_json) == {"reasoning_effort": "low"}
    assert wire.add_special_tokens
    assert not wire.HasField("add_generation_prompt")
    assert not wire.HasField("chat_template")
