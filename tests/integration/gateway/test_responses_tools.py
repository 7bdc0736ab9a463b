"""Tools, reasoning and structured output of responses, streamed and whole."""

from __future__ import annotations

from typing import Any

import openai

from tests.support.gateway import MODEL, Stack, saying, script
from tests.support.responses import RESPONSES, events_of
from tests.support.stack_fixtures import StartStack
from tests.support.tiny_tokenizer import THINK_ID, byte_ids

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
NOW = {"type": "function", "name": "now"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TWO = f'{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
THOUGHT = [THINK_ID, *byte_ids("Paris?\n"), THINK_ID + 1, *byte_ids("\n\n")]


async def both(stack: Stack, **fields: Any) -> list[dict[str, Any]]:
    """The response, whole and as the last event of a stream has it."""
    body = {"input": "hi", "tools": [WEATHER, NOW], "max_output_tokens": 400, **fields}
    whole = await stack.post(RESPONSES, body)
    assert whole.status == 200, whole.body
    streamed = events_of(await stack.post(RESPONSES, {**body, "stream": True}))
    assert [event["sequence_number"] for event in streamed] == list(range(len(streamed)))
    last = streamed[-1]["response"]
    done = [event["item"] for event in streamed if event["type"] == "response.output_item.done"]
    assert done == last["output"]
    return [whole.json(), last]


async def test_reasoning_text_and_two_calls(start_parsing: StartStack) -> None:
    stack = await start_parsing(script(saying([*THOUGHT, *byte_ids(f"I look.\n{TWO}")])))
    for made in await both(stack):
        assert made["status"] == "completed"
        thought, said, first, second = made["output"]
        assert (thought["type"], thought["id"][:3], thought["summary"]) == ("reasoning", "rs_", [])
        assert thought["content"] == [{"type": "reasoning_text", "text": "Paris?"}]
        assert said["content"][0]["text"] == "I look."
        assert (first["type"], first["name"], first["arguments"]) == (
            *("function_call", "get_weather", '{"city": "Paris"}'),
        )
        assert (second["name"], second["arguments"]) == ("now", "{}")
        assert first["id"].startswith("fc_")
        assert len({first["call_id"], second["call_id"]}) == 2
        assert {item["status"] for item in made["output"]} == {"completed"}
        assert made["usage"]["output_tokens_details"]["reasoning_tokens"] == 9
        assert [tool["name"] for tool in made["tools"]] == ["get_weather", "now"]


async def test_the_round_of_a_tool(start_parsing: StartStack) -> None:
    stack = await start_parsing(script(saying([*THOUGHT, *byte_ids(CALL)])))
    async with openai.AsyncOpenAI(base_url=f"{stack.address}/v1", api_key="k", max_retries=0) as client:
        tools: Any = [WEATHER]
        first = await client.responses.create(model=MODEL, input="weather?", tools=tools)
        call = first.output[-1]
        assert call.type == "function_call"
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        counted = await client.responses.input_tokens.count(
            model=MODEL, previous_response_id=first.id, input=[result], tools=tools
        )
        # The same conversation, sent whole by the client.
        sent: Any = [{"role": "user", "content": "weather?"}, *first.output, result]
        whole = await client.responses.create(model=MODEL, input=sent, tools=tools)
        short = await client.responses.create(
            model=MODEL, previous_response_id=first.id, input=[result], tools=tools
        )
        assert first.usage is not None
        assert whole.usage is not None
        assert short.usage is not None
        assert whole.usage.input_tokens == short.usage.input_tokens == counted.input_tokens
        assert counted.input_tokens > first.usage.input_tokens
        listed = await client.responses.input_items.list(whole.id, order="asc")
        assert [item.type for item in listed.data] == [
            *("message", "reasoning", "function_call", "function_call_output"),
        ]


async def test_a_stream_of_the_reference_client(start_parsing: StartStack) -> None:
    stack = await start_parsing(script(saying(f"I look.\n{CALL}"), step_delay_ms=1))
    async with openai.AsyncOpenAI(base_url=f"{stack.address}/v1", api_key="k", max_retries=0) as client:
        tools: Any = [WEATHER]
        text, arguments = "", ""
        async with client.responses.stream(model=MODEL, input="hi", tools=tools) as stream:
            async for event in stream:
                if event.type == "response.output_text.delta":
                    text += event.delta
                elif event.type == "response.function_call_arguments.delta":
                    arguments += event.delta
            final = await stream.get_final_response()
    assert text == final.output_text == "I look."
    assert arguments == '{"city": "Paris"}'
    assert [item.type for item in final.output] == ["message", "function_call"]


async def test_what_the_limit_cuts_is_incomplete(start_parsing: StartStack) -> None:
    # C31 and C40 of the bug reports.
    stack = await start_parsing(script(saying([*THOUGHT, *byte_ids(CALL)])))
    for made in await both(stack, max_output_tokens=70):
        assert made["status"] == "incomplete"
        assert [item["status"] for item in made["output"]] == ["completed", "incomplete"]
        assert made["output"][1]["name"] == "get_weather"
    for made in await both(stack, max_output_tokens=5):
        (thought,) = made["output"]
        assert (thought["type"], thought["status"]) == ("reasoning", "incomplete")
        assert made["usage"]["output_tokens_details"]["reasoning_tokens"] == 5


async def test_choices_of_tools(start_parsing: StartStack) -> None:
    stack = await start_parsing(script(saying(TWO)))
    for made in await both(stack, parallel_tool_calls=False):
        assert [item["type"] for item in made["output"]] == ["function_call"]
        assert made["parallel_tool_calls"] is False
    for made in await both(stack, tool_choice="none"):
        assert [item["type"] for item in made["output"]] == ["message"]
    for choice in ({"type": "function", "name": "get_weather"}, "required"):
        for made in await both(stack, tool_choice=choice):
            assert made["output"][0]["name"] == "get_weather"
            assert made["tool_choice"] == choice
    nobody = {"tool_choice": {"type": "function", "name": "nobody"}}
    refused = await stack.post(RESPONSES, {"input": "x", "tools": [NOW], **nobody})
    assert refused.status == 400
    assert refused.json()["error"]["param"].startswith("tool_choice")


async def test_log_probabilities_beside_a_parser_are_refused(start_parsing: StartStack) -> None:
    stack = await start_parsing()
    refused = await stack.post(RESPONSES, {"input": "x", "top_logprobs": 1})
    assert (refused.status, refused.json()["error"]["param"]) == (400, "include")


async def test_forms_of_the_text(stack: Stack) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    made = await stack.post(RESPONSES, {"input": "x", "max_output_tokens": 2, "text": {"format": form}})
    assert made.status == 200
    assert made.json()["text"]["format"] == form
    for bad, param in (
        ({"type": "json_schema", "name": "n"}, "text.format"),
        ({"type": "json_schema", "name": "n", "schema": {"type": "stsring"}}, "text.format"),
        ({"type": "json_schema", "schema": schema}, "text.format"),
    ):
        refused = await stack.post(RESPONSES, {"input": "x", "text": {"format": bad}})
        assert refused.status == 400
        assert refused.json()["error"]["param"].startswith(param)
