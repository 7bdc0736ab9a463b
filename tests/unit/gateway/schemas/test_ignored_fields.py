"""Fields that change no answer: which are taken, how they are named, and unknown ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.routes.pooling import read_embedding
from gateway.schemas.base import RequestLimits, RequestModel, parse_request
from gateway.schemas.chat import ChatRequest
from gateway.schemas.completion import CompletionRequest, DetokenizeRequest, TokenizeRequest
from gateway.schemas.ignored import (
    CHAT_FIELDS,
    EVERYWHERE,
    MAX_NAMES,
    IgnoredFields,
    field_path,
    noting,
    tree_of,
    without_ignored,
)
from gateway.schemas.pooling import RerankRequest, ScoreRequest
from gateway.schemas.responses import ResponsesRequest
from tests.support.steps import counted

LIMITS = RequestLimits()
USER = {"role": "user", "content": "x"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
BODIES: dict[type[RequestModel], dict[str, Any]] = {
    ChatRequest: {"messages": [USER]},
    CompletionRequest: {"prompt": "x"},
    ResponsesRequest: {"input": "x"},
    RerankRequest: {"query": "q", "documents": ["d"]},
    ScoreRequest: {"text_1": "a", "text_2": "b"},
    TokenizeRequest: {"prompt": "x"},
    DetokenizeRequest: {"tokens": []},
}


def read(model: type[RequestModel], lenient: Any = False, **fields: Any) -> tuple[RequestModel, list[str]]:
    """A request, and the names of what was ignored of it."""
    with noting(IgnoredFields(lenient=lenient)) as ignored:
        request = parse_request(model, {"model": "m", **BODIES[model], **fields}, LIMITS)
    return request, ignored.names


def chat(lenient: Any = False, **fields: Any) -> tuple[ChatRequest, list[str]]:
    request, names = read(ChatRequest, lenient, **fields)
    assert isinstance(request, ChatRequest)
    return request, names


def refused(model: type[RequestModel], lenient: bool = False, **fields: Any) -> tuple[str | None, str | None]:
    with pytest.raises(ApiError) as caught:
        read(model, lenient, **fields)
    assert caught.value.status == 400
    return caught.value.param, caught.value.code


@pytest.mark.parametrize("model", BODIES)
@pytest.mark.parametrize("name", [path for field in EVERYWHERE for path in field.paths])
def test_fields_that_every_route_takes(model: type[RequestModel], name: str) -> None:
    plain, _ = read(model)
    for value in ("x", {"a": [1]}, True, 7):
        assert read(model, **{name: value}) == (plain, [name])
    assert read(model, **{name: None}) == (plain, [])


@pytest.mark.parametrize("name", [path for field in CHAT_FIELDS for path in field.paths if "." not in path])
def test_fields_that_a_chat_takes(name: str) -> None:
    assert chat(**{name: "x"}) == (chat()[0], [name])


def test_embeddings_take_them_in_both_forms() -> None:
    bodies: list[tuple[dict[str, Any], set[str]]] = [
        ({"input": "x"}, {"chat_id"}),
        ({"messages": [{**USER, "cache_control": {}}]}, {"chat_id", "messages.0.cache_control"}),
    ]
    for body, names in bodies:
        with noting(IgnoredFields()) as ignored:
            read_embedding({"model": "m", **body, "chat_id": "c"}, LIMITS)
        assert set(ignored.names) == names


def test_fields_inside_of_others_are_named_by_their_paths() -> None:
    mark = {"type": "ephemeral"}
    part = {"type": "text", "text": "x", "cache_control": mark}
    spoken = {
        "role": "assistant",
        "content": [part],
        "tool_calls": [{**CALL, "cache_control": mark, "extra_content": {"google": {}}}],
        "provider_specific_fields": {"a": 1},
        "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}],
        "reasoning_content": "hm",
    }
    request, names = chat(
        messages=[{"role": "user", "content": [part, part]}, spoken],
        tools=[{**TOOL, "cache_control": mark}, {"type": "function", "function": {"name": "g"}}],
    )
    assert set(names) == {
        "messages.0.content.0.cache_control",
        "messages.0.content.1.cache_control",
        "messages.1.content.0.cache_control",
        "messages.1.tool_calls.0.cache_control",
        "messages.1.tool_calls.0.extra_content",
        "messages.1.provider_specific_fields",
        "messages.1.thinking_blocks",
        "tools.0.cache_control",
    }
    assert [message.texts for message in request.messages] == [("x", "x"), ("x",)]
    assert request.messages[1].thoughts == "hm"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"cache_prompts": True}, "cache_prompts"),
        ({"messages": [{**USER, "cache_controls": 1}]}, "messages.0.cache_controls"),
        ({"stop_sequences": ["x"]}, "stop_sequences"),
        ({"tools": [{**TOOL, "cost": 1}]}, "tools.0.cost"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ],
)
def test_what_no_route_knows_is_refused_or_ignored_as_the_operator_says(
    fields: dict[str, Any], param: str
) -> None:
    assert refused(ChatRequest, **fields) == (param, "unknown_parameter")
    assert chat(lenient=True, **fields)[1] == [param]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"typical_p": 0.5}, "typical_p"),
        ({"repeat_penalty": 1.1}, "repeat_penalty"),
        ({"repeat_last_n": 64}, "repeat_last_n"),
        ({"typ_p": 0.5}, "typ_p"),
        ({"xtc_probability": 0.5, "xtc_threshold": 0.1}, "xtc_probability"),
        ({"dry_multiplier": 0.8, "dry_base": 1.75}, "dry_multiplier"),
        ({"dynatemp_range": 0.5, "dynatemp_exponent": 1}, "dynatemp_range"),
        ({"mirostat": 2}, "mirostat"),
        ({"grammar": 'root ::= "a"'}, "grammar"),
        ({"n_predict": 5}, "n_predict"),
        ({"lora_path": "x"}, "lora_path"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"temperature": "hot", "frobnicate": 1}, "temperature"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ],
)
@pytest.mark.parametrize("lenient", [False, True])
def test_what_would_change_the_answer_is_refused_in_any_case(
    fields: dict[str, Any], param: str, lenient: bool
) -> None:
    assert refused(ChatRequest, lenient, **fields)[0] in (param, *(() if lenient else ("frobnicate",)))


def test_settings_of_llama_cpp_with_its_ways_to_sample_switched_off_are_taken() -> None:
    off = {"dynatemp_range": 0, "xtc_probability": 0, "dry_multiplier": 0, "mirostat": 0, "typ_p": 1}
    details = {
        **{"dynatemp_exponent": 1, "xtc_threshold": 0.1, "mirostat_tau": 5, "mirostat_eta": 0.1},
        **{"dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1},
        **{"dry_sequence_breakers": ["\n", ":"], "backend_sampling": False},
    }
    request, names = chat(**off, **details, repeat_penalty=1, repeat_last_n=-1)
    assert request == chat()[0]
    assert set(names) == set(details)


def test_nothing_that_was_ignored_is_left_in_the_request() -> None:
    tools = [{"type": "function", "function": {"name": "f", "x": 1}, "y": 2}]
    request, names = chat(lenient=True, tools=tools, z=3)
    assert set(names) == {"z", "tools.0.y", "tools.0.function.x"}
    assert request == chat(tools=[TOOL])[0]
    assert request.tools_json == '[{"type":"function","function":{"name":"f"}}]'


def test_tools_that_are_not_offered_are_named_once_and_as_a_whole() -> None:
    _, names = read(ResponsesRequest, True, tools=[{"type": "mcp", "server_label": "x", "headers": {}}])
    assert names == ["tools.0"]


def test_thousands_of_unknown_fields_are_told_in_part() -> None:
    messages = [{**USER, "k" * 200: 1, f"a{place}": 1} for place in range(2000)]
    _, names = chat(lenient=True, messages=messages)
    assert len(names) == MAX_NAMES + 1
    assert names[-1] == "..."
    assert sum(map(len, names)) < 4096


@given(st.lists(st.text() | st.integers(), min_size=1, max_size=20))
def test_a_name_in_the_header_has_no_characters_but_those_of_names(parts: list[int | str]) -> None:
    name = field_path(parts)
    assert name.isascii()
    assert len(name) <= 100
    assert not set(name) - set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-?")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["messages", "content", "cache_control", "tools", "a"]), inner)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["messages", "tools", "cache_prompt", "usage", "model"]), JSON))
def test_what_is_left_is_the_body_without_these_fields(body: dict[str, Any]) -> None:
    tree = tree_of(CHAT_FIELDS)
    with noting(IgnoredFields()) as ignored:
        left = without_ignored(body, tree, 1000)
    with noting(IgnoredFields()) as again:
        assert without_ignored(left, tree, 1000) == left
    assert again.names == []
    assert left.keys() == {name for name in body if name not in ("cache_prompt", "usage")}
    if not ignored.names and None not in body.values():
        assert left.get("model") == body.get("model")


def variables(known: set[str], lenient: bool = False, **fields: Any) -> tuple[dict[str, Any], list[str]]:
    with noting(IgnoredFields(lenient=lenient)) as ignored:
        request = parse_request(ChatRequest, {"model": "m", "messages": [USER], **fields}, LIMITS)
        return request.template_variables(frozenset(known)), ignored.names


KWARGS = "chat_template_kwargs"
ON, OFF = {"type": "enabled"}, {"type": "disabled"}


@pytest.mark.parametrize(
    ("known", "fields", "expected", "names"),
    [
        (set(), {"reasoning_effort": "high"}, {}, ["reasoning_effort"]),
        (set(), {"reasoning_effort": "none"}, {}, []),
        (set(), {"thinking": ON}, {}, ["thinking"]),
        (set(), {"thinking": {**ON, "budget_tokens": 1024}}, {}, ["thinking"]),
        (set(), {"thinking": OFF}, {}, []),
        (set(), {"think": True}, {}, ["think"]),
        (set(), {KWARGS: {"enable_thinking": False}}, {}, [f"{KWARGS}.enable_thinking"]),
        (set(), {KWARGS: {"thinking": True}}, {}, [f"{KWARGS}.thinking"]),
        ({"x"}, {KWARGS: {"thinking": True, "x": 1}}, {"x": 1}, [f"{KWARGS}.thinking"]),
        ({"enable_thinking"}, {"thinking": ON}, {"enable_thinking": True}, []),
        ({"enable_thinking"}, {"thinking": OFF}, {"enable_thinking": False}, []),
        ({"enable_thinking"}, {"think": False}, {"enable_thinking": False}, []),
        ({"thinking"}, {"thinking": {"type": "adaptive"}}, {"thinking": True}, []),
        ({"thinking"}, {"thinking": ON, "reasoning_effort": "low"}, {"thinking": True}, []),
        ({"reasoning_effort"}, {"thinking": ON}, {}, []),
        ({"reasoning_effort"}, {"thinking": OFF}, {"reasoning_effort": "none"}, []),
    ],
)
def test_thinking_where_a_template_knows_of_it_and_where_not(
    known: set[str], fields: dict[str, Any], expected: dict[str, Any], names: list[str]
) -> None:
    assert variables(known, **fields) == (expected, names)


@pytest.mark.parametrize(
    ("known", "fields", "param"),
    [
        ({"thinking"}, {KWARGS: {"enable_thinking": False}}, f"{KWARGS}.enable_thinking"),
        ({"reasoning_effort"}, {KWARGS: {"enable_thinking": False}}, f"{KWARGS}.enable_thinking"),
        (set(), {KWARGS: {"enabled_thinking": False}}, f"{KWARGS}.enabled_thinking"),
        ({"enable_thinking"}, {"thinking": {**ON, "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"enable_thinking"}, {"thinking": ON, KWARGS: {"enable_thinking": False}}, "thinking"),
        (set(), {"thinking": ON, "think": False}, "think"),
        (set(), {"thinking": ON, "reasoning_effort": "none"}, "thinking"),
        (set(), {"think": False, "reasoning_effort": "high"}, "think"),
        (set(), {"thinking": {"type": "sometimes"}}, "thinking.type"),
    ],
)
def test_thinking_that_cannot_be_had(known: set[str], fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        variables(known, **fields)
    assert caught.value.param == param


def test_variables_that_a_template_does_not_read_are_ignored_if_the_operator_says_so() -> None:
    assert variables({"thinking"}, True, **{KWARGS: {"enable_thinking": False, "y": 1}}) == (
        {},
        [f"{KWARGS}.enable_thinking", f"{KWARGS}.y"],
    )


def test_a_flood_of_items_is_not_walked_through_before_it_is_refused() -> None:
    marked = {**USER, "cache_control": {}}
    tree = tree_of(CHAT_FIELDS)
    with noting(IgnoredFields()) as ignored:
        body = {"messages": [marked] * 50_000, "chat_id": "c"}
        left, calls = counted(lambda: without_ignored(body, tree, RequestLimits().most_items))
        assert left["messages"] is body["messages"]
        assert calls < 1000
        assert ignored.names == ["chat_id"]
    parts = {"messages": [{"role": "user", "content": [{"cache_control": 1}] * 20}] * 4000}
    _, calls = counted(lambda: without_ignored(parts, tree, RequestLimits().most_items))
    # A few for each of the 25,000 items that a valid request may have, though there are 84,000.
    assert calls < 500_000


def test_unknown_fields_of_a_long_chat_are_told_in_their_order() -> None:
    messages = [{**USER, "extra": 1, "content": [{"type": "text", "text": "x", "more": 2}]}] * 40
    with noting(IgnoredFields(lenient=True)) as ignored:
        parse_request(ChatRequest, {"messages": messages, "odd": 3}, RequestLimits())
    assert ignored.names[:4] == ["odd", "messages.0.extra", "messages.0.content.0.more", "messages.1.extra"]
    assert (len(ignored.names), ignored.names[-1]) == (33, "...")
