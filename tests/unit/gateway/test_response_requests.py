"""Requests for responses: the chat that each becomes, and which field a refusal names."""

from __future__ import annotations

from typing import Any

import pytest

from catenary.telemetry import new_id
from gateway.errors import ApiError
from gateway.responses import items
from gateway.responses.conversion import chat_body, of_response
from gateway.responses.given import given_items
from gateway.responses.request import read_request
from gateway.responses.turns import Origin, chat_messages
from gateway.schemas import RequestLimits

LIMITS = RequestLimits()
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


def chat(**fields: Any) -> dict[str, Any]:
    request, passed_on = read_request({"model": "m", "input": "x", **fields}, LIMITS)
    return chat_body(request, [], given_items(request.input, new_id, {}), passed_on).body


def messages(*conversation: dict[str, Any]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = chat(input=list(conversation))["messages"]
    return made


def test_forms_of_the_input() -> None:
    assert chat(input="hi")["messages"] == [{"role": "user", "content": "hi"}]
    assert chat(instructions="be", input="hi")["messages"][0] == {"role": "system", "content": "be"}
    assert messages({"role": "developer", "content": [{"type": "input_text", "text": "a"}]}) == [
        {"role": "developer", "content": "a"}
    ]
    two = [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b", "annotations": []}]
    assert messages({"role": "user", "content": two})[0]["content"] == [
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
    ]


def test_what_a_model_put_out_is_one_message() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"role": "assistant", "content": "so"}
    calls = [
        {"type": "function_call", "call_id": f"c{index}", "name": "f", "arguments": "{}"} for index in (1, 2)
    ]
    given = [{"type": "function_call_output", "call_id": f"c{index}", "output": "r"} for index in (1, 2)]
    made = messages({"role": "user", "content": "q"}, thought, said, *calls, *given, said, said)
    assert [message["role"] for message in made] == [
        *("user", "assistant", "tool", "tool", "assistant", "assistant")
    ]
    turn = made[1]
    assert (turn["content"], turn["reasoning_content"]) == ("so", "hm")
    assert [call["id"] for call in turn["tool_calls"]] == ["c1", "c2"]
    assert turn["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert made[2] == {"role": "tool", "tool_call_id": "c1", "content": "r"}
    assert messages(calls[0])[0]["content"] is None
    assert messages(calls[0], thought)[1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
    }


def test_parameters_by_their_names_in_chats() -> None:
    body = chat(
        max_output_tokens=5,
        temperature=0.5,
        reasoning={"effort": "low"},
        tools=[TOOL],
        tool_choice={"type": "function", "name": "f"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        top_logprobs=3,
        top_k=4,
        stop=["x"],
        parallel_tool_calls=False,
    )
    del body["messages"]
    assert body == {
        "model": "m",
        "max_completion_tokens": 5,
        "temperature": 0.5,
        "reasoning_effort": "low",
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
        ],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
        },
        "logprobs": True,
        "top_logprobs": 3,
        "top_k": 4,
        "stop": ["x"],
        "parallel_tool_calls": False,
    }
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
    assert chat(tool_choice=allowed)["tool_choice"] == {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
    }
    assert chat(text={"format": {"type": "text"}}).keys() == {"model", "messages"}
    assert chat(tools=[], store=False, truncation="disabled", include=[]).keys() == {"model", "messages"}


USER = {"role": "user", "content": "x"}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": []}, "input", "invalid_value"),
    ({"input": None}, "input", "invalid_type"),
    ({"input": [5]}, "input.0", "invalid_type"),
    ({"input": [{"role": "user"}]}, "input.0.content", "missing_required_parameter"),
    ({"input": [{"role": "king", "content": "x"}]}, "input.0.role", "invalid_value"),
    ({"input": [USER, {"role": "user", "content": []}]}, "input.1.content", "invalid_value"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/"}]}]},
        "input.0.content.0",
        "unsupported_parameter",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]},
        "input.0.content.0.text",
        "invalid_type",
    ),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.call_id", "missing_required_parameter"),
    ({"input": [USER, {"type": "item_reference"}]}, "input.1.id", "missing_required_parameter"),
    ({"input": [{"id": "x" * 257}]}, "input.0.id", "invalid_value"),
    ({"input": [{"type": "item_reference", "id": "x", "role": "user"}]}, "input.0.role", "unknown_parameter"),
    ({"input": [{"type": "web_search_call"}]}, "input.0", "unsupported_parameter"),
    (
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
        "input.0",
        "unsupported_parameter",
    ),
    ({"input": [{**USER, "<message>": 1}]}, "input.0.?", "unknown_parameter"),
    ({"tools": [{"type": "web_search"}]}, "tools.0", "unsupported_parameter"),
    ({"tools": [{**TOOL, "defer_loading": True}]}, "tools.0", "unsupported_parameter"),
    ({"tools": [{**TOOL, "x": True}]}, "tools.0.x", "unknown_parameter"),
    ({"tools": [5]}, "tools.0", "invalid_type"),
    ({"tools": [{"type": "function"}]}, "tools.0.name", "missing_required_parameter"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
    ({"text": {"verbosity": "high"}}, "text.verbosity", "unsupported_parameter"),
    ({"truncation": "some"}, "truncation", "invalid_value"),
    ({"truncation": "auto", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "invalid_value"),
    ({"include": ["file_search_call.results"]}, "include.0", "unsupported_parameter"),
    ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "unsupported_parameter"),
    ({"conversation": "c"}, "conversation", "unsupported_parameter"),
    ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
    ({"max_tool_calls": 3}, "max_tool_calls", "unsupported_parameter"),
    ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    ({"temperature": float("nan")}, "temperature", "invalid_value"),
    ({"top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"stream_options": {}}, "stream_options", "invalid_value"),
    ({"background": True, "store": False}, "store", "invalid_value"),
    ({"metadata": {"k" * 65: "v"}}, "metadata", "invalid_value"),
    ({"messages": [USER]}, "messages", "unknown_parameter"),
    ({"max_tokens": 5}, "max_tokens", "unknown_parameter"),
]


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED)
def test_refusals_name_the_field(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    found = caught.value
    assert (found.status, found.param, found.code) == (400, param, code)


@pytest.mark.parametrize(
    ("chats", "ours"),
    [
        ("messages.0", "instructions"),
        ("messages.1.content", "previous_response_id"),
        ("messages.2.content", "input.2"),
        ("messages.2.tool_calls.0.function.arguments", "input.1.arguments"),
        ("messages.2.tool_calls.1.function.arguments", "input.2.arguments"),
        ("messages.2.tool_calls.1.function.name", "input.2.name"),
        ("messages.1.tool_calls.0.function.arguments", "previous_response_id"),
        ("messages", "input"),
        ("max_completion_tokens", "max_output_tokens"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("response_format", "text.format"),
        ("tools.0.function.name", "tools.0.name"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("top_logprobs", "top_logprobs"),
    ],
)
def test_errors_of_the_chat_name_our_fields(chats: str, ours: str) -> None:
    error = ApiError(400, f"Invalid '{chats}': no.", param=chats, code="c")
    before = Origin("previous_response_id", ("previous_response_id",))
    given = Origin("input.2", ("input.1", "input.2"))
    found = of_response(error, (Origin("instructions"), before, given))
    assert (found.param, found.message, found.code) == (ours, f"Invalid '{ours}': no.", "c")


def test_ids_of_clients_are_kept() -> None:
    request, _ = read_request(
        {"model": "m", "input": [{"role": "user", "content": "x", "id": "msg_mine"}, USER]}, LIMITS
    )
    first, second = given_items(request.input, new_id, {})
    assert first.id == "msg_mine"
    assert second.id.startswith("msg_")
    assert items.decode_items(items.encode_items([first, second])) == [first, second]


def test_each_message_knows_where_it_came_from() -> None:
    user = items.Message("m", "user", [items.InputText("x")])
    call = items.FunctionCall("f", "c", "f", "{}")
    made = list(chat_messages([(user, "a"), (call, "b"), (call, "c"), (user, "d")]))
    assert [origin for _, origin in made] == [Origin("a"), Origin("c", ("b", "c")), Origin("d")]
