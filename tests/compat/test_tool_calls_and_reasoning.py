"""Users' bug reports, section D: tool calls and reasoning."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.parsing.choice import ParserChoice
from gateway.parsing.output import ToolCallArguments
from gateway.parsing.toolset import ToolSet
from tests.support.chat_answers import told
from tests.support.gateway import Stack, saying, script
from tests.support.http import Answer
from tests.support.stack_fixtures import StartStack
from tests.support.tiny_tokenizer import THINK_ID, byte_ids

MODES = pytest.mark.parametrize("stream", [False, True])
# One token a step and a pause in between: every token travels alone.
SLOW: dict[str, Any] = {"step_delay_ms": 2}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


SUM = tool("sum", n1={"type": "integer"})


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def ask(stack: Stack, *, stream: bool, **fields: Any) -> Answer:
    return await stack.chat(stream=stream, **{"max_tokens": 300, "tools": [SUM], **fields})


def usage_of(answer: Answer) -> dict[str, Any]:
    if answer.headers["content-type"] == "application/json":
        return dict(answer.json()["usage"])
    return dict(answer.events[-2]["usage"])


@MODES
@pytest.mark.parametrize("stop", [None, ["b,c"]])
async def test_c03_reasoning_is_told_apart_with_stop_strings_too(
    start_parsing: StartStack, stream: bool, stop: list[str] | None
) -> None:
    tokens = [THINK_ID, *byte_ids("x"), THINK_ID + 1, *byte_ids("y")]
    stack = await start_parsing(script(saying(tokens), **SLOW))
    said = told(await ask(stack, stream=stream, tools=None, stop=stop))
    assert (said.reasoning, said.content) == ("x", "y")


NAMED = {"type": "function", "function": {"name": "sum"}}


@MODES
@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
async def test_c31_a_call_cut_by_the_limit_ends_with_length(
    start_parsing: StartStack, stream: bool, choice: Any
) -> None:
    stack = await start_parsing(script(saying(call("sum", '{"n1": [7, ' + "1" * 80 + "]}"))))
    said = told(await ask(stack, stream=stream, max_tokens=64, tool_choice=choice))
    # Half a number would read as another one.
    assert (said.names, said.arguments, said.finish_reason) == (["sum"], ['{"n1": [7, '], "length")


@MODES
async def test_c32_a_call_of_a_models_own_will_ends_with_tool_calls(
    start_parsing: StartStack, stream: bool
) -> None:
    stack = await start_parsing(script(saying(call("sum", '{"n1": 1}'))))
    said = told(await ask(stack, stream=stream, tool_choice="auto"))
    assert (said.arguments, said.finish_reason) == (['{"n1": 1}'], "tool_calls")


@MODES
@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
async def test_c32_what_a_call_that_was_asked_for_ends_with(
    start_parsing: StartStack, stream: bool, choice: Any, reason: str
) -> None:
    stack = await start_parsing(script(saying(call("sum", '{"n1": 1}'))))
    said = told(await ask(stack, stream=stream, tool_choice=choice))
    assert (said.names, said.arguments, said.finish_reason) == (["sum"], ['{"n1": 1}'], reason)


@MODES
async def test_c33_required_calls_as_json_are_told_once(start_stack: StartStack, stream: bool) -> None:
    """A model whose format nobody knows writes what the constraint wants: an array."""
    stack = await start_stack(script(saying('[{"name": "sub", "parameters": {"a":9,"b":5}}]'), **SLOW))
    said = told(await ask(stack, stream=stream, tools=[tool("sub")], tool_choice="required"))
    assert (said.content, said.names, said.arguments) == ("", ["sub"], ['{"a":9,"b":5}'])
    assert said.finish_reason == "tool_calls"


@MODES
async def test_c33_required_means_at_least_one(start_stack: StartStack, stream: bool) -> None:
    calls = '[{"name": "sub", "parameters": {"a":9}}, {"name": "sum", "parameters": {"n1":1}}]'
    stack = await start_stack(script(saying(calls)))
    said = told(await ask(stack, stream=stream, tools=[tool("sub"), SUM], tool_choice="required"))
    assert (said.names, said.arguments) == (["sub", "sum"], ['{"a":9}', '{"n1":1}'])
    assert len(set(said.ids)) == 2


@MODES
async def test_c34_calls_have_indices_and_ids_of_their_own(start_parsing: StartStack, stream: bool) -> None:
    stack = await start_parsing(script(saying(call("sum", '{"n1": 1}') + call("sum", '{"n1": 2}'))))
    ids = []
    for _ in range(2):
        answer = await ask(stack, stream=stream, n=2)
        for index in range(2):
            said = told(answer, index)
            assert said.arguments == ['{"n1": 1}', '{"n1": 2}']
            ids += said.ids
    assert len(set(ids)) == len(ids) == 8


@MODES
async def test_c35_arguments_in_front_of_the_name(start_parsing: StartStack, stream: bool) -> None:
    text = '<tool_call>{"arguments":{"n1":2},"name":"sum"}</tool_call>'
    stack = await start_parsing(script(saying(text), **SLOW))
    said = told(await ask(stack, stream=stream))
    assert (said.names, said.arguments) == (["sum"], ['{"n1":2}'])


@pytest.mark.parametrize("value", ["null", "text", '"null"'])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": ["string", "null"]},
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"oneOf": [{"type": "null"}, {"$ref": "#/$defs/word"}]},
        {},
        {"type": 7},
        {"anyOf": "x"},
    ],
)
def test_c39_types_in_every_form(schema: dict[str, Any], value: str) -> None:
    parameters = {"properties": {"a": schema}, "$defs": {"word": {"type": "string"}}}
    choice = ParserChoice("qwen3_coder", "", ToolSet({"f": parameters}))
    parser = choice.parser("")
    parts = parser.feed(f"<tool_call><function=f><parameter=a>{value}</parameter></function></tool_call>")
    text = "".join(part.text for part in parts if isinstance(part, ToolCallArguments))
    nullable = (
        ("anyOf" in schema and isinstance(schema["anyOf"], list))
        or "oneOf" in schema
        or (schema.get("type") == ["string", "null"])
    )
    assert json.loads(text) == {"a": None if value == "null" and nullable else value}


@MODES
@pytest.mark.parametrize("value", ["null", '"x"'])
async def test_c39_a_union_is_taken(start_parsing: StartStack, stream: bool, value: str) -> None:
    stack = await start_parsing(script(saying(call("f", f'{{"a": {value}}}'))))
    said = told(await ask(stack, stream=stream, tools=[tool("f", a={"type": ["string", "null"]})]))
    assert said.arguments == [f'{{"a": {value}}}']


@MODES
async def test_c40_thoughts_that_were_cut_are_no_content(start_parsing: StartStack, stream: bool) -> None:
    tokens = [THINK_ID, *byte_ids("thinking... and on")]
    stack = await start_parsing(script(saying(tokens)))
    answer = await ask(stack, stream=stream, tools=None, max_tokens=12)
    said = told(answer)
    assert (said.reasoning, said.content, said.finish_reason) == ("thinking...", "", "length")
    if not stream:
        assert answer.json()["choices"][0]["message"]["content"] is None


@MODES
async def test_c41_an_answer_inside_of_the_tag_stays_reasoning(
    start_parsing: StartStack, stream: bool
) -> None:
    """The rule: what the prompt opened only the model's closing tag ends. It is all told, and counted."""
    stack = await start_parsing(script(saying("Answer.")))
    opened = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "<think>\n"},
    ]
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = await stack.post(
        "/v1/chat/completions",
        {"messages": opened, "continue_final_message": True, "stream": stream, "max_tokens": 40, **options},
    )
    said = told(answer)
    assert (said.reasoning, said.content, said.finish_reason) == ("Answer.", "", "stop")
    assert usage_of(answer)["completion_tokens_details"] == {"reasoning_tokens": 7}
