"""Tool calls and reasoning in chat answers, streamed and whole, over a scripted engine."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from gateway.auth import Caller
from gateway.generation.chat import prepare_chat
from gateway.schemas.base import parse_request
from gateway.schemas.chat import ChatRequest
from tests.support.chat_answers import told
from tests.support.gateway import MODEL, Stack, saying, script
from tests.support.stack_fixtures import StartStack
from tests.support.tiny_tokenizer import IM_START_ID, THINK_ID, byte_ids

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a {city}.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = {"tools": [WEATHER, NOW]}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TWO = f'{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
BAD_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "what"}}}
USAGE = {"stream_options": {"include_usage": True}}
MODES = pytest.mark.parametrize("stream", [False, True])


async def ask(stack: Stack, *, stream: bool, **fields: Any) -> Any:
    return await stack.chat(stream=stream, max_tokens=fields.pop("max_tokens", 400), **fields)


@MODES
async def test_a_call(start_parsing: StartStack, stream: bool) -> None:
    stack = await start_parsing(script(saying(f"I will look.\n{CALL}")))
    said = told(await ask(stack, stream=stream, **TOOLS))
    assert (said.content, said.names, said.finish_reason) == ("I will look.", ["get_weather"], "tool_calls")
    assert said.arguments == ['{"city": "Paris"}']
    assert said.ids[0].startswith("call_")


async def test_chunks_of_a_call_have_the_published_shape(start_parsing: StartStack) -> None:
    stack = await start_parsing(script(saying(CALL), step_delay_ms=2))
    answer = await ask(stack, stream=True, **TOOLS)
    deltas = [choice["delta"] for event in answer.events[:-1] for choice in event["choices"]]
    call_id = deltas[1]["tool_calls"][0]["id"]
    assert deltas[1] == {
        "tool_calls": [
            {
                "index": 0,
                "id": call_id,
                "type": "function",
                "function": {"name": "get_weather", "arguments": ""},
            }
        ]
    }
    # A character a token, a token a step: arguments stream as they come. What comes while nobody reads is one
    # chunk.
    texts = [delta["tool_calls"][0]["function"]["arguments"] for delta in deltas[2:-1]]
    assert deltas[2:-1] == [{"tool_calls": [{"index": 0, "function": {"arguments": text}}]} for text in texts]
    assert (len(texts) > 1, "".join(texts)) == (True, '{"city": "Paris"}')
    assert deltas[-1] == {}


@MODES
async def test_two_calls_and_at_most_one(start_parsing: StartStack, stream: bool) -> None:
    stack = await start_parsing(script(saying(TWO)))
    said = told(await ask(stack, stream=stream, n=2, **TOOLS), 1)
    assert (said.content, said.names, said.arguments) == (
        "",
        ["get_weather", "now"],
        ['{"city": "Paris"}', "{}"],
    )
    said = told(await ask(stack, stream=stream, parallel_tool_calls=False, **TOOLS))
    assert (said.names, said.finish_reason) == (["get_weather"], "tool_calls")


@MODES
@pytest.mark.parametrize("delay", [0, 1])
async def test_an_answer_ends_with_the_one_call_that_is_wanted(
    start_parsing: StartStack, stream: bool, delay: int
) -> None:
    text = f"I look.\n{TWO} and so on, for long"
    until = text.index("}}") + 1
    one = {"parallel_tool_calls": False, **TOOLS}
    counted = USAGE if stream else {}
    # Without a delay several tokens come together.
    stack = await start_parsing(script(saying(text), step_delay_ms=delay))
    answer = await ask(stack, stream=stream, **one, **counted)
    said = told(answer)
    assert (said.content, said.names, said.finish_reason) == ("I look.", ["get_weather"], "tool_calls")
    assert _usage(answer, stream=stream)["completion_tokens"] == until
    await stack.idle()
    more = await ask(stack, stream=stream, min_tokens=until + 5, **one, **counted)
    assert _usage(more, stream=stream)["completion_tokens"] == until + 5
    assert told(more).names == ["get_weather"]
    assert told(await ask(stack, stream=stream, max_tokens=until, **one)).finish_reason == "tool_calls"
    assert told(await ask(stack, stream=stream, max_tokens=until - 1, **one)).finish_reason == "length"


def _usage(answer: Any, *, stream: bool) -> Any:
    return answer.events[-2]["usage"] if stream else answer.json()["usage"]


@MODES
async def test_reasoning_then_a_call(start_parsing: StartStack, stream: bool) -> None:
    tokens = [THINK_ID, *byte_ids("Paris?\n"), THINK_ID + 1, *byte_ids(f"\n\n{CALL}")]
    stack = await start_parsing(script(saying(tokens)))
    answer = await ask(stack, stream=stream, **TOOLS, **(USAGE if stream else {}))
    said = told(answer)
    assert (said.reasoning, said.content, said.names) == ("Paris?", "", ["get_weather"])
    usage = answer.events[-2]["usage"] if stream else answer.json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 9}
    assert usage["completion_tokens"] == len(tokens) + 1
    quiet = told(await ask(stack, stream=stream, include_reasoning=False, **TOOLS))
    assert (quiet.reasoning, quiet.names) == ("", ["get_weather"])


@MODES
async def test_without_tools_a_call_is_text(start_parsing: StartStack, stream: bool) -> None:
    stack = await start_parsing(script(saying(CALL)))
    for fields in ({}, {**TOOLS, "tool_choice": "none"}):
        said = told(await ask(stack, stream=stream, **fields))
        assert (said.content, said.names, said.finish_reason) == (CALL, [], "stop")


@MODES
async def test_malformed_calls_are_content(start_parsing: StartStack, stream: bool) -> None:
    text = '<tool_call>{"name": 7}</tool_call> <tool_call>'
    stack = await start_parsing(script(saying(text)))
    said = told(await ask(stack, stream=stream, **TOOLS))
    assert (said.content, said.names, said.finish_reason) == (text, [], "stop")


@MODES
async def test_a_stop_string_and_log_probabilities_go_with_a_call(
    start_parsing: StartStack, stream: bool
) -> None:
    stack = await start_parsing(script(saying(f"Hm. {CALL} END and more")))
    answer = await ask(stack, stream=stream, stop="END", logprobs=True, **TOOLS)
    said = told(answer)
    assert (said.content, said.names, said.finish_reason) == ("Hm.", ["get_weather"], "tool_calls")
    choices = (
        [choice for event in answer.events[:-1] for choice in event["choices"]]
        if stream
        else (answer.json()["choices"])
    )
    tokens = [entry["token"] for choice in choices for entry in (choice["logprobs"] or {}).get("content", ())]
    assert "".join(tokens) == f"Hm. {CALL} "


@MODES
async def test_only_control_tokens_of_the_format_are_shown(start_parsing: StartStack, stream: bool) -> None:
    stack = await start_parsing(script(saying([IM_START_ID, *byte_ids("a"), IM_START_ID])))
    assert told(await ask(stack, stream=stream, **TOOLS)).content == "a"


@MODES
async def test_tool_choice_is_checked_before_admission(start_parsing: StartStack, stream: bool) -> None:
    stack = await start_parsing()
    unknown = {"type": "function", "function": {"name": "nope"}}
    strict = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "what"}}}
    for fields, param in (
        ({**TOOLS, "tool_choice": unknown}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [strict]}, "tools"),
        ({**TOOLS, "guided_regex": "a"}, "guided_regex"),
        ({**TOOLS, "response_format": BAD_FORMAT}, "response_format.json_schema.schema"),
    ):
        answer = await ask(stack, stream=stream, **fields)
        assert (answer.status, answer.json()["error"]["param"]) == (400, param), answer.body
    nothing: list[dict[str, Any]] = [{}, {"tools": []}, {"tools": None}, {"functions": []}]
    auto = {"tool_choice": "auto", "function_call": "auto"}
    for fields in nothing:
        answer = await ask(stack, stream=stream, **fields, **auto, max_tokens=1)
        assert answer.status == 200, answer.body
    await stack.alive()


@MODES
async def test_an_answer_in_a_format_beside_tools(start_parsing: StartStack, stream: bool) -> None:
    """An agent's request: a call, or an answer by the schema."""
    form = {"response_format": {"type": "json_object"}, **TOOLS}
    stack = await start_parsing(script(saying(CALL)))
    said = told(await ask(stack, stream=stream, **form))
    assert (said.names, said.finish_reason) == (["get_weather"], "tool_calls")


async def test_a_constraint_holds_behind_thoughts_that_the_prompt_opened(start_parsing: StartStack) -> None:
    service = (await start_parsing()).gateway.generation
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>\n"}]
    for messages, after in ((turns, "</think>"), (turns[:1], "")):
        body = {
            "model": MODEL,
            "messages": messages,
            "continue_final_message": len(messages) > 1,
            "response_format": {"type": "json_object"},
        }
        fields = parse_request(ChatRequest, body, service.requests.limits)
        async with service.requests.detached(Caller()) as request:
            model = service.requests.models.require(MODEL)
            plan = await service.plan(prepare_chat(fields, model, request.caller), request)
        assert plan.constraint is not None
        assert plan.constraint.after == after


@MODES
async def test_a_call_and_its_result_go_back(start_parsing: StartStack, stream: bool) -> None:
    stack = await start_parsing(script(saying("Sunny.")))
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    ]
    body = {"messages": messages, "stream": stream, "max_tokens": 20, **TOOLS}
    assert told(await stack.post("/v1/chat/completions", body)).content == "Sunny."


@MODES
async def test_a_model_without_a_parser_refuses_tools(stack: Stack, stream: bool) -> None:
    answer = await ask(stack, stream=stream, **TOOLS)
    assert (answer.status, answer.json()["error"]["param"]) == (400, "tools")
    assert told(await ask(stack, stream=stream, tools=[], max_tokens=3)).finish_reason == "length"
    await stack.alive()


FUNCTIONS = {"functions": [WEATHER["function"], NOW["function"]]}


@MODES
async def test_functions_as_they_were_before_tools(start_parsing: StartStack, stream: bool) -> None:
    stack = await start_parsing(script(saying(f"I look.\n{TWO}")))
    answer = await ask(stack, stream=stream, **FUNCTIONS)
    content, call, reason = _legacy(answer, stream=stream)
    assert (content, call, reason) == (
        *("I look.", {"name": "get_weather", "arguments": '{"city": "Paris"}'}, "function_call"),
    )
    assert b"tool_calls" not in answer.body
    named = {**FUNCTIONS, "function_call": {"name": "get_weather"}}
    assert _legacy(await ask(stack, stream=stream, **named), stream=stream)[1:] == (call, "stop")
    silent = await ask(stack, stream=stream, **FUNCTIONS, function_call="none")
    assert told(silent).content == f"I look.\n{TWO}"


def _legacy(answer: Any, *, stream: bool) -> tuple[str, dict[str, str], str]:
    assert answer.status == 200, answer.body
    if not stream:
        (choice,) = answer.json()["choices"]
        ChatCompletion.model_validate_json(answer.body, strict=True)
        message = choice["message"]
        return message["content"] or "", message["function_call"], choice["finish_reason"]
    choices = [choice for event in answer.events[:-1] for choice in event["choices"]]
    call: dict[str, str] = {}
    for choice in choices:
        delta = choice["delta"].get("function_call", {})
        assert ("name" in delta) == (bool(delta) and not call)
        call = {
            name: call.get(name, "") + text for name, text in {**dict.fromkeys(call, ""), **delta}.items()
        }
    content = "".join(choice["delta"].get("content", "") for choice in choices)
    return content, call, choices[-1]["finish_reason"]


async def test_a_chat_with_functions_is_rendered_as_one_with_tools(start_parsing: StartStack) -> None:
    stack = await start_parsing()
    call = {"name": "now", "arguments": "{}"}
    user = {"role": "user", "content": "hi"}
    older = {
        "messages": [
            user,
            {"role": "assistant", "content": None, "function_call": call},
            {"role": "function", "name": "now", "content": "noon"},
        ],
        **FUNCTIONS,
    }
    newer = {
        "messages": [
            user,
            {"role": "assistant", "tool_calls": [{"id": "call00000", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": "call00000", "name": "now", "content": "noon"},
        ],
        **TOOLS,
    }
    rendered = [await stack.post("/v1/chat/completions/render", body) for body in (older, newer)]
    assert rendered[0].json()["token_ids"] == rendered[1].json()["token_ids"]
