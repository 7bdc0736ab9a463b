"""Requests: what is taken, and which field a refusal names."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.schemas.base import RequestLimits, RequestModel, parse_request
from gateway.schemas.chat import ChatRequest
from gateway.schemas.completion import CompletionRequest
from gateway.schemas.ignored import CHAT, COMPLETION, IgnoredFields, noting
from gateway.schemas.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from gateway.schemas.responses import ResponsesRequest
from tests.support.steps import counted

MESSAGES = [{"role": "user", "content": "x"}]
LIMITS = RequestLimits()


def chat(**fields: Any) -> ChatRequest:
    return parse_request(ChatRequest, {"model": "m", "messages": MESSAGES, **fields}, LIMITS)


def completion(**fields: Any) -> CompletionRequest:
    return parse_request(CompletionRequest, {"model": "m", "prompt": "x", **fields}, LIMITS)


def refused(parse: Any, **fields: Any) -> dict[str, Any]:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    return msgspec.to_builtins(caught.value.envelope().error)


BAD_COMMON = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 10**12),
    ("max_tokens", 1.0),
    ("max_tokens", True),
    ("max_tokens", "5"),
    ("temperature", -0.1),
    ("temperature", 2.01),
    ("temperature", 3),
    ("temperature", "0"),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("top_p", -0.1),
    ("top_p", 1.1),
    ("top_p", -1),
    ("top_k", -2),
    ("top_k", 2**40),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", float("nan")),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("repetition_penalty", 101),
    ("repetition_penalty", float("inf")),
    ("n", 0),
    ("n", -1),
    ("n", 1.5),
    ("n", "2"),
    ("n", 17),
    ("n", 129),
    ("n", 10**9),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", 1.5),
    ("stop", ["a"] * 5),
    ("stop", ["a"] * 100),
    ("stop", "a" * 513),
    ("stop", 5),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [1] * 65),
    ("stop_token_ids", 1),
    ("min_tokens", -1),
    ("min_tokens", 10**12),
    ("stream", 1),
    ("stream", "true"),
    ("stream_options", {"include_usage": True}),
    ("user", 5),
    ("metadata", "x"),
    ("ignore_eos", 1),
    ("model", None),
    ("model", 7),
]


@pytest.mark.parametrize("parse", [chat, completion])
@pytest.mark.parametrize(("name", "value"), BAD_COMMON)
def test_bad_values_are_named(parse: Any, name: str, value: Any) -> None:
    error = refused(parse, **{name: value})
    assert error["param"].split(".")[0] == name
    assert error["type"] == "invalid_request_error"
    assert error["code"]


GOOD_COMMON = [
    {},
    {"max_tokens": 1},
    {"temperature": 0},
    {"temperature": 1e-6},
    {"temperature": 2.0},
    {"top_p": 1},
    {"top_p": 0},
    {"top_k": -1},
    {"top_k": 0},
    {"min_p": 0},
    {"min_p": 1},
    {"repetition_penalty": 1.0},
    {"repetition_penalty": 0.01},
    {"n": 16},
    {"n": None},
    {"seed": 2**63 - 1},
    {"seed": -(2**63)},
    {"stop": "a"},
    {"stop": ["a", "b", "c", "d"]},
    {"stop": []},
    {"stop": None},
    {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": False}},
    {"stream": False, "stream_options": None},
    {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k"},
    {"ignore_eos": True, "min_tokens": 3, "stop_token_ids": [5]},
]


@pytest.mark.parametrize("parse", [chat, completion])
@pytest.mark.parametrize("fields", GOOD_COMMON)
def test_good_values_are_taken(parse: Any, fields: dict[str, Any]) -> None:
    assert parse(**fields).model == "m"


NEUTRAL = [
    ("frequency_penalty", 0),
    ("frequency_penalty", 0.0),
    ("presence_penalty", None),
    ("logit_bias", {}),
    ("response_format", {"type": "text"}),
    ("store", False),
    ("skip_special_tokens", True),
    ("service_tier", "auto"),
    ("service_tier", "default"),
    ("stop", ""),
    ("stop", [""]),
    ("stop", ["", ""]),
    ("best_of", 0),
    ("best_of", 1),
    ("n", 1),
    ("temperature", 1),
    ("stream_options", {}),
    ("stream_options", {"include_usage": False}),
    ("stream_options", {"include_usage": None, "continuous_usage_stats": False}),
    ("logprobs", False),
    ("logprobs", None),
    ("prompt_logprobs", None),
    ("echo", False),
    ("use_beam_search", False),
    ("length_penalty", 1.0),
    ("early_stopping", False),
    ("structured_outputs", {}),
    ("guided_regex", ""),
    ("guided_decoding_backend", "auto"),
    ("bad_words", []),
    ("stop_token_ids", []),
    ("min_tokens", 0),
    ("metadata", {}),
    ("user", ""),
    ("vllm_xargs", {}),
    ("kv_transfer_params", {}),
    ("logits_processors", []),
    ("prompt_embeds", []),
    ("typical_p", 1.0),
    ("mirostat", 0),
    ("repeat_penalty", 1),
    ("dry_multiplier", 0.0),
    ("reasoning_format", "auto"),
    ("n_predict", -1),
    ("grammar", ""),
    ("separate_reasoning", True),
]
CHAT_NEUTRAL: list[Any] = [
    ("tools", None),
    ("tools", []),
    ("tool_choice", "none"),
    ("tool_choice", "auto"),
    ("functions", []),
    ("function_call", "none"),
    ("function_call", "auto"),
    ("top_logprobs", 0),
    ("top_logprobs", None),
    ("documents", []),
    ("modalities", []),
    ("verbosity", "medium"),
    ("parallel_tool_calls", False),
    ("reasoning_effort", "none"),
    ("thinking", None),
    ("chat_template_kwargs", {}),
    ("modalities", ["text"]),
    ("reasoning_effort", None),
    ("parallel_tool_calls", True),
    ("chat_template_kwargs", None),
]


@pytest.mark.parametrize("parse", [chat, completion])
@pytest.mark.parametrize(("name", "value"), NEUTRAL)
def test_values_that_ask_for_nothing_are_taken(parse: Any, name: str, value: Any) -> None:
    with noting(IgnoredFields()) as ignored:
        fields = parse(**{name: value})
    assert (fields.stops, fields.samples, fields.top_count, fields.wants_usage) == ((), 1, None, False)
    assert ignored.names == []


@pytest.mark.parametrize(("name", "value"), CHAT_NEUTRAL)
def test_chat_values_that_ask_for_nothing_are_taken(name: str, value: Any) -> None:
    with noting(IgnoredFields()) as ignored:
        fields = chat(**{name: value})
    assert (fields.tools_json, fields.top_count, fields.template_variables(frozenset())) == ("", None, {})
    assert ignored.names == []


def test_an_empty_suffix_asks_for_nothing() -> None:
    assert completion(suffix="").prompt == ["x"]
    assert refused(completion, suffix="x")["code"] == "unsupported_parameter"


def test_usage_in_each_chunk_needs_usage_at_all() -> None:
    for options, wanted in (
        ({"include_usage": False, "continuous_usage_stats": True}, False),
        ({"continuous_usage_stats": True}, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True),
    ):
        assert chat(stream=True, stream_options=options).wants_running_usage is wanted
    assert refused(chat, stream_options={"continuous_usage_stats": True})["param"] == "stream_options"


@pytest.mark.parametrize(
    ("parse", "name", "value", "counterpart"),
    [
        (chat, "n_predict", 8, "max_tokens"),
        (completion, "n_predict", 8, "max_tokens"),
        (chat, "n_probs", 3, "top_logprobs"),
        (completion, "n_probs", 3, "logprobs"),
        (completion, "repeat_penalty", 1.1, "repetition_penalty"),
        (completion, "grammar", 'root ::= "a"', "structured_outputs.grammar"),
        (chat, "ebnf", 'root ::= "a"', "structured_outputs.grammar"),
        (chat, "regex", "a+", "structured_outputs.regex"),
        (chat, "json_schema", {"type": "object"}, "structured_outputs.json"),
    ],
)
def test_a_parameter_of_another_server_is_refused_with_its_name_here(
    parse: Any, name: str, value: Any, counterpart: str
) -> None:
    error = refused(parse, **{name: value})
    assert error["message"] == f"The parameter '{name}' is not supported by this server: use '{counterpart}'."
    # And what it says is taken.
    field, _, key = counterpart.partition(".")
    beside = {"logprobs": True} if counterpart == "top_logprobs" else {}
    parse(**{field: {key: value} if key else value}, **beside)


@pytest.mark.parametrize("parse", [chat, completion])
@pytest.mark.parametrize(
    "name", ["token_ids_logprob", "logits_processors", "kv_transfer_params", "repeat_penalty"]
)
@pytest.mark.parametrize("value", [0.5, True, {"1": 5}, {"type": "json_object"}, "x", False])
def test_known_parameters_are_refused_by_name(parse: Any, name: str, value: Any) -> None:
    error = refused(parse, **{name: value})
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert name in error["message"]


@pytest.mark.parametrize("name", sorted(CHAT))
def test_every_known_chat_parameter_is_refused_or_neutral(name: str) -> None:
    chat(**{name: None})
    for value in CHAT[name]:
        chat(**{name: value})
    assert refused(chat, **{name: {"something": ["else"]}})["param"] == name


@pytest.mark.parametrize("name", sorted(COMPLETION))
def test_every_known_completion_parameter_is_refused_or_neutral(name: str) -> None:
    completion(**{name: None})
    assert refused(completion, **{name: {"something": ["else"]}})["param"] == name


def test_unknown_parameters_are_refused_by_name() -> None:
    assert refused(chat, frobnicate=1) == {
        "message": "Unknown parameter: 'frobnicate'.",
        "type": "invalid_request_error",
        "param": "frobnicate",
        "code": "unknown_parameter",
    }
    assert refused(chat, **{"<script>\r\n": 1})["param"] == "?"
    assert len(refused(chat, **{"a" * 10_000: 1})["param"]) <= 100


NEAR: list[tuple[type[RequestModel], dict[str, Any], str, str]] = [
    (ChatRequest, {"messages": MESSAGES, "max_token": 3}, "max_token", "max_tokens"),
    (ChatRequest, {"message": MESSAGES}, "message", "messages"),
    (ChatRequest, {"prompt": MESSAGES}, "prompt", "messages"),
    (ChatRequest, {"messages": MESSAGES, "Temperature": 1}, "Temperature", "temperature"),
    (
        ChatRequest,
        {"messages": MESSAGES, "max_output_tokens": 1},
        "max_output_tokens",
        "max_completion_tokens",
    ),
    (ChatRequest, {"messages": [{"role": "user", "contents": "x"}]}, "messages.0.contents", "content"),
    (
        ChatRequest,
        {"messages": [{"role": "user", "content": [{"type": "text", "txt": "x"}]}]},
        "messages.0.content.0.txt",
        "text",
    ),
    (
        ChatRequest,
        {"messages": MESSAGES, "stream": True, "stream_options": {"include_usages": True}},
        "stream_options.include_usages",
        "include_usage",
    ),
    (
        ChatRequest,
        {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f", "parameter": {}}}]},
        "tools.0.function.parameter",
        "parameters",
    ),
    (CompletionRequest, {"promt": "x"}, "promt", "prompt"),
    (CompletionRequest, {"messages": MESSAGES}, "messages", "prompt"),
    (CompletionRequest, {"prompt": "x", "max_tokens ": 3}, "?", "max_tokens"),
    (ResponsesRequest, {"messages": MESSAGES}, "messages", "input"),
    (ResponsesRequest, {"input": "x", "max_tokens": 3}, "max_tokens", "max_output_tokens"),
    (ResponsesRequest, {"input": "x", "response_format": {}}, "response_format", "text.format"),
    (ResponsesRequest, {"input": "x", "repetition_penalti": 1}, "repetition_penalti", "repetition_penalty"),
    (
        ResponsesRequest,
        {"input": "x", "text": {"format": {"type": "text", "schemas": {}}}},
        "text.format.schemas",
        "schema",
    ),
    (
        ResponsesRequest,
        {"input": [{"type": "function_call", "call_id": "a", "name": "f", "argument": "{}"}]},
        "input.0.argument",
        "arguments",
    ),
    (
        ResponsesRequest,
        {"input": "x", "tools": [{"type": "function", "name": "f", "descriptions": ""}]},
        "tools.0.descriptions",
        "description",
    ),
    (EmbeddingRequest, {"inputs": "x"}, "inputs", "input"),
    (EmbeddingRequest, {"prompt": "x"}, "prompt", "input"),
    (RerankRequest, {"query": "x", "document": ["x"]}, "document", "documents"),
    (RerankRequest, {"quary": "x", "documents": ["x"]}, "quary", "query"),
    (ScoreRequest, {"text1": "x", "text_2": "x"}, "text1", "text_1"),
]


@pytest.mark.parametrize(("model", "body", "param", "meant"), NEAR)
def test_an_unknown_parameter_is_told_with_the_nearest_known_one(
    model: type[RequestModel], body: dict[str, Any], param: str, meant: str
) -> None:
    assert refused(lambda: parse_request(model, body, LIMITS)) == {
        "message": f"Unknown parameter: '{param}' (did you mean '{meant}'?).",
        "type": "invalid_request_error",
        "param": param,
        "code": "unknown_parameter",
    }


def test_a_variant_of_a_union_is_not_told_the_fields_of_another() -> None:
    # `arguments` is a field of calls alone.
    item = {"type": "message", "role": "user", "content": "x", "argument": "{}"}
    error = refused(lambda: parse_request(ResponsesRequest, {"input": [item]}, LIMITS))
    assert error["message"] == "Unknown parameter: 'input.0.argument'."


def test_a_long_unknown_name_is_compared_with_nothing() -> None:
    name = "max_tokens" * 300_000
    assert "did you mean" not in refused(chat, **{name: 1})["message"]


BAD_MESSAGES: list[Any] = [
    (None, "messages"),
    ("x", "messages"),
    ([], "messages"),
    ([123], "messages.0"),
    ([{}], "messages.0.role"),
    ([{"role": "user"}], "messages.0.content"),
    ([{"role": 123, "content": "x"}], "messages.0.role"),
    ([{"role": "alien", "content": "x"}], "messages.0.role"),
    ([{"role": "tool", "content": "x"}], "messages.0.tool_call_id"),
    ([{"role": "user", "content": 123}], "messages.0.content"),
    ([{"role": "user", "content": None}], "messages.0.content"),
    ([{"role": "user", "content": []}], "messages.0.content"),
    ([{"role": "user", "content": ["x"]}], "messages.0.content.0"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}],
        "messages.0.content.0",
    ),
    ([{"role": "user", "content": "x", "extra": 1}], "messages.0.extra"),
    (
        [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}],
        "messages.0.tool_calls.0.function",
    ),
]


@pytest.mark.parametrize(("messages", "param"), BAD_MESSAGES)
def test_bad_messages_are_named(messages: Any, param: str) -> None:
    assert refused(chat, messages=messages)["param"] == param


def test_messages_that_clients_send_back_are_taken() -> None:
    sent_back: dict[str, Any] = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "tool_calls": None,
        "audio": None,
        "annotations": [],
    }
    request = chat(
        messages=[*MESSAGES, sent_back, {"role": "developer", "content": [{"type": "text", "text": "a"}] * 2}]
    )
    assert [message.texts for message in request.messages] == [("x",), ("x",), ("a", "a")]


def test_a_tool_that_gave_nothing_says_nothing() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = {"role": "assistant", "content": [], "tool_calls": [call]}
    gave = {"role": "tool", "tool_call_id": "c", "content": []}
    called = {"role": "function", "name": "f", "content": []}
    request = chat(messages=[*MESSAGES, asked, gave, called])
    assert [message.texts for message in request.messages] == [("x",), (), ("",), ()]
    for message in (
        {"role": "user", "content": []},
        {"role": "assistant", "content": []},
        {"role": "system", "content": []},
    ):
        assert refused(chat, messages=[message])["param"] == "messages.0.content"
    assert refused(chat, messages=[{"role": "tool", "tool_call_id": "c"}])["param"] == "messages.0.content"


def test_labels_of_an_answer_that_comes_back_are_dropped() -> None:
    cited = {
        "role": "assistant",
        "content": "x",
        "annotations": [{"type": "url_citation", "url_citation": {}}],
    }
    assert chat(messages=[cited]) == chat(messages=[{"role": "assistant", "content": "x"}])
    assert refused(chat, messages=[{**cited, "annotations": "x"}])["param"] == "messages.0.annotations"


BAD_PROMPTS = ["", [], [1, "a"], [True], [1.0], 5, None, {}, [[1], "a"], ["a"] * 129]


@pytest.mark.parametrize("prompt", BAD_PROMPTS)
def test_bad_prompts_are_named(prompt: Any) -> None:
    assert refused(completion, prompt=prompt)["param"] == "prompt"


@pytest.mark.parametrize(
    ("prompt", "place"), [([[]], 0), ([""], 0), (["a", ""], 1), (["a", "b", "", ""], 2), ([[1], []], 1)]
)
def test_an_empty_prompt_among_others_is_named_by_its_place(prompt: Any, place: int) -> None:
    found = refused(completion, prompt=prompt)
    assert found["param"] == f"prompt.{place}"
    assert found["message"] == f"Invalid 'prompt.{place}': prompts must not be empty."


@pytest.mark.parametrize(
    ("prompt", "read"), [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2]], [[1], [2]])]
)
def test_all_forms_of_a_prompt(prompt: Any, read: Any) -> None:
    assert completion(prompt=prompt).prompt == read


@pytest.mark.advisory("CVE-2026-73559")
def test_prompts_times_n_are_limited() -> None:
    assert refused(completion, prompt=["a"] * 100, n=3)["param"] == "n"


def test_logprobs() -> None:
    assert chat(logprobs=True).top_count == 0
    assert chat(logprobs=True, top_logprobs=20).top_count == 20
    assert chat(logprobs=False).top_count is None
    assert completion(logprobs=0).top_count == 0
    assert completion(logprobs=None).top_count is None
    for value in (True, -1, 6, 1.0):
        assert refused(completion, logprobs=value)["param"] == "logprobs"
    assert refused(chat, logprobs=True, top_logprobs=21)["param"] == "top_logprobs"
    assert refused(chat, top_logprobs=1)["param"] == "top_logprobs"
    assert refused(chat, logprobs=1)["param"] == "logprobs"


def test_the_smaller_limit_counts() -> None:
    assert chat(max_tokens=5, max_completion_tokens=3).token_limit == 3
    assert chat(max_completion_tokens=7).token_limit == 7
    assert refused(chat, max_completion_tokens=5, min_tokens=6)["param"] == "min_tokens"


@pytest.mark.advisory("CVE-2024-8939")
def test_best_of() -> None:
    assert completion(n=2, best_of=2, stream=True).n == 2
    assert completion(best_of=1).choices == 1
    for fields in ({"n": 2, "best_of": 1}, {"best_of": 3, "stream": True}, {"best_of": 10**6}):
        assert refused(completion, **fields)["param"] == "best_of"


FLOODS: list[tuple[Any, dict[str, Any], str]] = [
    (chat, {"messages": [{}] * 500_000}, "messages"),
    (chat, {"messages": MESSAGES * 500_000}, "messages"),
    (chat, {"messages": [{"role": "user", "content": [{}] * 500_000}]}, "messages"),
    (chat, {"messages": [{str(key): 1 for key in range(100_000)}]}, "messages.0"),
    (chat, {"metadata": {str(key): 1 for key in range(100_000)}}, "metadata"),
    (chat, {"stop": [1] * 500_000}, "stop"),
    (chat, {"stop_token_ids": ["1"] * 500_000}, "stop_token_ids"),
    (chat, {"stream_options": {str(key): 1 for key in range(100_000)}}, "stream_options"),
    (completion, {"prompt": [[5]] * 500_000}, "prompt"),
    (completion, {"prompt": [1.5] * 500_000}, "prompt"),
]


@pytest.mark.parametrize(("parse", "fields", "param"), FLOODS)
def test_floods_of_items_are_refused_at_a_glance(parse: Any, fields: dict[str, Any], param: str) -> None:
    error, calls = counted(lambda: refused(parse, **fields))
    assert error["param"] == param
    # Each item that were looked at would be a call at least.
    assert calls < 2000


def test_a_flood_of_parameters_is_refused() -> None:
    assert refused(chat, **{f"p{number}": 1 for number in range(100_000)})["param"] is None


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
names = st.sampled_from([*ChatRequest.model_fields, *CompletionRequest.model_fields, *CHAT, "other"])


@given(st.dictionaries(names, json_values, max_size=6))
def test_any_object_is_taken_or_refused_with_400(body: dict[str, Any]) -> None:
    for kind in (ChatRequest, CompletionRequest):
        error = None
        try:
            parse_request(kind, {"model": "m", "messages": MESSAGES, "prompt": "x"} | body, LIMITS)
        except ApiError as caught:
            error = caught
        assert error is None or (error.status == 400 and msgspec.json.decode(error.body()))
