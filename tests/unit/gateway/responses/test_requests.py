"""Requests for responses: the chat that each becomes, and which field a refusal names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from catenary.telemetry import new_id
from catenary.text import Vocabulary
from catenary.v1 import common_pb2
from gateway.errors import ApiError
from gateway.responses import objects
from gateway.responses.request import (
    Origin,
    Origins,
    ResponseRequest,
    chat_body,
    chat_messages,
    input_items,
    of_response,
    read_request,
    response_request,
)
from gateway.schemas.base import RequestLimits
from gateway.schemas.ignored import IgnoredFields, noting
from gateway.text.models import Model
from tests.support.tiny_tokenizer import tokenizer_json

LIMITS = RequestLimits()
VOCABULARY = Vocabulary(json.dumps(tokenizer_json()).encode(), sha256="x")
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


def chat(**fields: Any) -> dict[str, Any]:
    request, passed_on = read_request({"model": "m", "input": "x", **fields}, LIMITS)
    return chat_body(request, [], input_items(request.input, new_id, {}), passed_on).body


def made(**fields: Any) -> tuple[ResponseRequest, list[str]]:
    """A request on its way, and the names of what was ignored of it."""
    with noting(IgnoredFields()) as ignored:
        request, passed_on = read_request({"model": "m", "input": "x", **fields}, LIMITS)
        found = response_request(request, passed_on, [], {}, limits=LIMITS, owner="", store=False)
        found.chat.template_variables(frozenset())
    return found, ignored.names


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
    ({"input": []}, "input", "missing_required_parameter"),
    ({"input": None}, "input", "missing_required_parameter"),
    ({"input": {}}, "input", "invalid_type"),
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
    ({"tools": [{"type": "web_surf"}]}, "tools.0", "unsupported_parameter"),
    ({"tools": [{**TOOL, "defer_loading": True}]}, "tools.0", "unsupported_parameter"),
    ({"tools": [{**TOOL, "x": True}]}, "tools.0.x", "unknown_parameter"),
    ({"tools": [5]}, "tools.0", "invalid_type"),
    ({"tools": [{"type": "function"}]}, "tools.0.name", "missing_required_parameter"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
    ({"text": {"verbosity": "huge"}}, "text.verbosity", "invalid_value"),
    ({"truncation": "some"}, "truncation", "invalid_value"),
    ({"truncation": "auto", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "invalid_value"),
    ({"include": ["file_search_call.secrets"]}, "include.0", "unsupported_parameter"),
    ({"reasoning": {"summary": "always"}}, "reasoning.summary", "invalid_value"),
    ({"conversation": "c"}, "conversation", "unsupported_parameter"),
    ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
    ({"max_tool_calls": -3}, "max_tool_calls", "invalid_value"),
    ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    ({"temperature": float("nan")}, "temperature", "invalid_value"),
    ({"top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options", "invalid_value"),
    ({"background": True, "store": False}, "store", "invalid_value"),
    ({"metadata": {"k" * 65: "v"}}, "metadata", "invalid_value"),
    ({"messages": [USER]}, "messages", "unknown_parameter"),
    ({"max_tokens": 5}, "max_tokens", "unknown_parameter"),
]
ALLOWED = {"type": "allowed_tools", "mode": "required"}
NOT_OFFERED: list[tuple[list[Any], Any, str, str]] = [
    ([{"type": "custom", "name": "c"}], "required", "tool_choice", "'custom'"),
    ([{"type": "web_search"}, {"type": "custom"}], "required", "tool_choice", "'custom', 'web_search'"),
    ([{"type": "custom", "name": "c"}], {"type": "custom", "name": "c"}, "tool_choice.type", "'custom'"),
    ([{"type": "custom", "name": "c"}], {"type": "function", "name": "c"}, "tool_choice", "'custom'"),
    ([{"type": "mcp"}], {**ALLOWED, "tools": [{"type": "function", "name": "f"}]}, "tool_choice", "'mcp'"),
    ([TOOL], {"type": "web_search_preview"}, "tool_choice.type", "'web_search_preview'"),
    ([TOOL], {"type": "mcp", "server_label": "x"}, "tool_choice.type", "'mcp'"),
    ([TOOL, {"type": "mcp"}], {**ALLOWED, "tools": [{"type": "mcp"}]}, "tool_choice.tools", "'mcp'"),
    ([TOOL], {**ALLOWED, "mode": "auto", "tools": [{"type": "shell"}]}, "tool_choice.tools", "'shell'"),
]


@pytest.mark.parametrize(("tools", "choice", "param", "kinds"), NOT_OFFERED)
def test_a_choice_among_tools_that_are_not_offered_says_so(
    tools: list[Any], choice: Any, param: str, kinds: str
) -> None:
    with pytest.raises(ApiError) as caught:
        chat(tools=tools, tool_choice=choice)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, "unsupported_value")
    assert caught.value.message == (
        f"Invalid '{param}': tools of type {kinds} are not supported by this server, which ignores them; "
        "only those of type 'function' can be called."
    )


@pytest.mark.parametrize(
    ("name", "counterpart"),
    [
        ("n_predict", "max_output_tokens"),
        ("grammar", "structured_outputs.grammar"),
        ("n_probs", "top_logprobs"),
    ],
)
def test_a_parameter_of_another_server_is_refused_with_its_name_in_responses(
    name: str, counterpart: str
) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**{name: 3})
    assert caught.value.message == (
        f"The parameter '{name}' is not supported by this server: use '{counterpart}'."
    )


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED)
def test_refusals_name_the_field(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    found = caught.value
    assert (found.status, found.param, found.code) == (400, param, code)


REFUSED_BY_THE_CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"tool_choice": "king"}, "tool_choice", "invalid_value"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tools": [], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "invalid_value"),
    ({"tools": [{"type": "mcp"}, {**TOOL, "name": "a b"}]}, "tools.1.name", "invalid_value"),
]


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED_BY_THE_CHAT)
def test_refusals_of_the_chat_name_the_field_of_the_response(
    fields: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(ApiError) as caught:
        made(**fields)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)


ASKS_FOR_NOTHING: list[dict[str, Any]] = [
    {"tools": [], "tool_choice": "auto"},
    {"tools": None, "tool_choice": "auto"},
    {"tool_choice": "auto", "parallel_tool_calls": True},
    {"tool_choice": "none"},
    {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "include": []},
    {"include": None, "reasoning": {}, "text": {}, "metadata": {}, "stream_options": {}},
    {"reasoning": {"effort": None, "summary": None, "generate_summary": None}},
    {"text": {"format": {"type": "text"}, "verbosity": "medium"}},
    {"max_tool_calls": None, "conversation": None, "prompt": None, "context_management": []},
    {"prompt_cache_retention": "in_memory", "truncation": "disabled", "service_tier": "auto"},
    {"background": False, "store": None, "top_logprobs": 0, "stream": False},
]


@pytest.mark.parametrize("fields", ASKS_FOR_NOTHING)
def test_values_that_ask_for_nothing_are_taken(fields: dict[str, Any]) -> None:
    found, ignored = made(**fields)
    assert (found.chat.tools_json, found.chat.logprobs, ignored) == ("", None, [])


IGNORED: list[tuple[dict[str, Any], list[str]]] = [
    ({"include": ["reasoning.encrypted_content"]}, ["include.0"]),
    ({"include": ["message.output_text.logprobs", "file_search_call.results"]}, ["include.1"]),
    ({"reasoning": {"summary": "auto"}}, ["reasoning.summary"]),
    ({"reasoning": {"generate_summary": "concise"}}, ["reasoning.generate_summary"]),
    ({"reasoning": {"effort": "high", "summary": "detailed"}}, ["reasoning.summary", "reasoning.effort"]),
    ({"reasoning": {"effort": "none"}}, []),
    ({"text": {"verbosity": "low"}}, ["text.verbosity"]),
    ({"client_metadata": {"a": "b"}}, ["client_metadata"]),
    ({"prompt_cache_retention": "24h"}, ["prompt_cache_retention"]),
    ({"tools": [{"type": "web_search", "external_web_access": False}, TOOL]}, ["tools.0"]),
    ({"tools": [{"type": "custom", "name": "p", "format": {"type": "grammar"}}]}, ["tools.0"]),
    ({"tools": [{"type": "local_shell"}, {"type": "image_generation"}]}, ["tools.0", "tools.1"]),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [TOOL]}], "tool_choice": "auto"}, ["tools.0"]),
    ({"tools": [{**TOOL, "cache_control": {"type": "ephemeral"}}]}, ["tools.0.cache_control"]),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "cache_control": {}}]}]},
        ["input.0.content.0.cache_control"],
    ),
    (
        {
            "tools": [TOOL, {"type": "mcp"}],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "mcp"}, {"type": "function", "name": "f"}],
            },
        },
        ["tools.1", "tool_choice.tools.0"],
    ),
]


@pytest.mark.parametrize(("fields", "names"), IGNORED)
def test_what_changes_no_answer_is_taken_and_named(fields: dict[str, Any], names: list[str]) -> None:
    found, ignored = made(**fields)
    assert ignored == names
    offered = [tool["name"] for tool in found.response.tools]
    assert offered == ["f"] * sum(tool.get("type") == "function" for tool in fields.get("tools", ()))


def test_what_was_asked_is_told_again() -> None:
    response = made()[0].response
    assert (response.temperature, response.top_p) == (1.0, 1.0)
    assert (response.presence_penalty, response.frequency_penalty) == (0.0, 0.0)
    response = made(
        temperature=0.5,
        top_p=0,
        presence_penalty=0.5,
        frequency_penalty=-2,
        max_tool_calls=3,
        reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "high"},
    )[0].response
    assert (response.temperature, response.top_p) == (0.5, 0)
    assert (response.presence_penalty, response.frequency_penalty) == (0.5, -2)
    assert (response.max_tool_calls, response.reasoning) == (3, {"effort": "low", "summary": "auto"})
    assert response.text["verbosity"] == "high"


@pytest.mark.parametrize(("asked", "told"), [({}, (0.6, 0.9)), ({"temperature": 0, "top_p": 1}, (0, 1))])
def test_the_models_own_sampling_is_told_where_the_request_leaves_it_to_the_model(
    asked: dict[str, Any], told: tuple[float, float]
) -> None:
    info = common_pb2.ModelInfo(name="m", default_temperature=0.6, default_top_p=0.9)
    request = made(**asked)[0]
    request.settle(Model("m", 100, 512, VOCABULARY, info))
    assert (request.response.temperature, request.response.top_p) == told


def test_an_input_may_be_left_out_where_something_else_is_said() -> None:
    empty: list[dict[str, Any]] = [{"input": []}, {"input": None}]
    for nothing in empty:
        assert chat(instructions="be", **nothing)["messages"] == [{"role": "system", "content": "be"}]
        assert chat(previous_response_id="resp_1", **nothing)["messages"] == []


def test_labels_of_what_was_said_before_are_taken_and_told_again() -> None:
    said = {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "phase": "final_answer",
        "content": [
            {
                "type": "output_text",
                "text": "x",
                "annotations": [{"type": "url_citation", "url": "http://x/"}],
                "logprobs": [{"token": "x", "logprob": 0, "bytes": [], "top_logprobs": []}],
            }
        ],
    }
    assert messages(said) == [{"role": "assistant", "content": "x"}]
    for phase, told in (("commentary", '"phase":"commentary"'), (None, "")):
        request, _ = read_request({"model": "m", "input": [{**said, "phase": phase}]}, LIMITS)
        written = objects.encode_items(input_items(request.input, new_id, {})).decode()
        assert told in written
        assert ("phase" in written) is bool(told)
        assert objects.encode_items(objects.decode_items(written.encode())).decode() == written


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
        ("tools.0.function.name", "tools.2.name"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("top_logprobs", "top_logprobs"),
    ],
)
def test_errors_of_the_chat_name_our_fields(chats: str, ours: str) -> None:
    error = ApiError(400, f"Invalid '{chats}': no.", param=chats, code="c")
    before = Origin("previous_response_id", ("previous_response_id",))
    given = Origin("input.2", ("input.1", "input.2"))
    found = of_response(error, Origins((Origin("instructions"), before, given), (2,)))
    assert (found.param, found.message, found.code) == (ours, f"Invalid '{ours}': no.", "c")


def test_ids_of_clients_are_kept() -> None:
    request, _ = read_request(
        {"model": "m", "input": [{"role": "user", "content": "x", "id": "msg_mine"}, USER]}, LIMITS
    )
    first, second = input_items(request.input, new_id, {})
    assert first.id == "msg_mine"
    assert second.id.startswith("msg_")
    assert objects.decode_items(objects.encode_items([first, second])) == [first, second]


def test_each_message_knows_where_it_came_from() -> None:
    user = objects.ResponseMessage("m", "user", [objects.InputText("x")])
    call = objects.FunctionCall("f", "c", "f", "{}")
    made = list(chat_messages([(user, "a"), (call, "b"), (call, "c"), (user, "d")]))
    assert [origin for _, origin in made] == [Origin("a"), Origin("c", ("b", "c")), Origin("d")]
