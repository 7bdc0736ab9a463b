"""Fields that have no effect, and a model that is not named: over HTTP, on every route, as clients do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.support.batches import CHAT, COMPLETIONS, ended, line, results, started
from tests.support.gateway import MODEL, Stack, saying, script
from tests.support.http import call
from tests.support.pooling import EMBEDDINGS, embedding, stack
from tests.support.responses import RESPONSES, events_of
from tests.support.stack_fixtures import StartStack

__all__ = ["stack"]

IGNORED = "x-catenary-ignored"
USER = {"role": "user", "content": "x"}
MARKED = {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}
GENERATING: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER], "max_tokens": 2},
    COMPLETIONS: {"prompt": "x", "max_tokens": 2},
    RESPONSES: {"input": "x", "max_output_tokens": 2},
    "/invocations": {"messages": [USER], "max_tokens": 2},
    "/v1/chat/completions/render": {"messages": [USER]},
    "/v1/completions/render": {"prompt": "x"},
    "/v1/responses/input_tokens": {"input": "x"},
    "/tokenize": {"prompt": "x"},
    "/v1/tokenize": {"messages": [USER]},
    "/detokenize": {"tokens": [300]},
}
POOLING: dict[str, dict[str, Any]] = {
    EMBEDDINGS: {"input": "Q"},
    "/v1/rerank": {"query": "Q", "documents": ["X"]},
    "/rerank": {"query": "Q", "documents": ["X"]},
    "/v2/rerank": {"query": "Q", "documents": ["X"]},
    "/v1/score": {"text_1": "Q", "text_2": "X"},
    "/score": {"text_1": "Q", "text_2": "X"},
    "/v1/pooling": {"input": "Q"},
    "/pooling": {"messages": [USER]},
    "/invocations": {"input": "Q"},
}


async def every_route(stack: Stack, bodies: dict[str, dict[str, Any]]) -> None:
    """Names of fields in the header, and a model that is left out, on each of these routes."""
    for path, body in bodies.items():
        plain = await call(stack.address, "POST", path, body)
        assert plain.status == 200, (path, plain.body)
        assert IGNORED not in plain.headers
        assert plain.json().get("model", MODEL) == MODEL if isinstance(plain.json(), dict) else True
        for nothing in (None, ""):
            assert (await call(stack.address, "POST", path, {**body, "model": nothing})).status == 200
        named = await stack.post(path, {**body, "chat_id": "c", "rid": "r"})
        assert named.status == 200, (path, named.body)
        assert set(named.headers[IGNORED].split(", ")) == {"chat_id", "rid"}
        unknown = await stack.post(path, {**body, "frobnicate": 1})
        error = unknown.json()["error"]
        assert (unknown.status, error["param"], error["code"]) == (400, "frobnicate", "unknown_parameter")


async def test_every_generating_route(start_stack: StartStack) -> None:
    await every_route(await start_stack(script(saying("ab"))), GENERATING)


async def test_every_pooling_route(stack: Stack) -> None:
    await every_route(stack, POOLING)


async def test_streams_and_errors_have_the_header_too(start_stack: StartStack) -> None:
    stack = await start_stack(script(saying("ab")), cors_allow_origins=("*",))
    body = {"messages": [MARKED, USER], "cache_prompt": True, "stream": True}
    answer = await stack.post(CHAT, body, {"Origin": "http://x"})
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert set(answer.headers[IGNORED].split(", ")) == {"cache_prompt", "messages.0.content.0.cache_control"}
    assert IGNORED in answer.headers["access-control-expose-headers"].lower()
    streamed = await stack.post(RESPONSES, {"input": "x", "stream": True, "client_metadata": {"a": "b"}})
    assert streamed.headers[IGNORED] == "client_metadata"
    assert events_of(streamed)[-1]["type"] == "response.completed"
    failed = await stack.post(CHAT, {"messages": [USER], "cache_prompt": True, "temperature": 9})
    assert (failed.status, failed.headers[IGNORED]) == (400, "cache_prompt")
    # The next request on the same gateway starts with none.
    assert IGNORED not in (await stack.chat(max_tokens=1)).headers


async def test_unknown_fields_are_ignored_where_the_operator_says_so(start_stack: StartStack) -> None:
    stack = await start_stack(script(saying("ab")), unknown_fields="ignore")
    for path, body in GENERATING.items():
        answer = await stack.post(path, {**body, "frobnicate": {"a": [1]}, "b\r\nx-evil: 1": 2})
        assert answer.status == 200, (path, answer.body)
        assert set(answer.headers[IGNORED].split(", ")) == {"frobnicate", "?"}
        assert "x-evil" not in answer.headers
    nested = await stack.post(
        CHAT, {"messages": [{**USER, "mood": "good"}], "chat_template_kwargs": {"y": 1}, "max_tokens": 1}
    )
    assert set(nested.headers[IGNORED].split(", ")) == {"messages.0.mood", "chat_template_kwargs.y"}
    refused = await stack.post(CHAT, {"messages": [USER], "mirostat": 2, "frobnicate": 1})
    assert (refused.status, refused.json()["error"]["param"]) == (400, "mirostat")


async def test_a_choice_of_tools_with_more_than_it_needs(start_parsing: StartStack) -> None:
    stack = await start_parsing(script(saying("ab")), unknown_fields="ignore")
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    named = {"type": "function", "function": {"name": "f", "mood": 1}, "id": "x"}
    allowed = {"mode": "auto", "tools": [{**tools[1], "id": 1}], "why": 1}
    for choice, names in (
        (named, {"tool_choice.id", "tool_choice.function.mood"}),
        (
            {"type": "allowed_tools", "allowed_tools": allowed, "id": 1},
            {"tool_choice.id", "tool_choice.allowed_tools.why", "tool_choice.allowed_tools.tools.0.id"},
        ),
    ):
        body = {"messages": [USER], "tools": tools, "tool_choice": choice, "max_tokens": 1}
        asked = await stack.post("/v1/chat/completions/render", body)
        assert asked.status == 200, asked.body
        assert set(asked.headers[IGNORED].split(", ")) == names
    for bad in ({**named, "function": {"id": 1}}, {"type": "function", "id": 1}):
        body = {"messages": [USER], "tools": tools, "tool_choice": bad}
        assert (await stack.post(CHAT, body)).status == 400


async def test_documents_with_more_than_a_text(start_stack: StartStack) -> None:
    stack = await start_stack(embedding(), unknown_fields="ignore")
    marked = {"text": "X", "id": 7}
    for path, body, names in (
        ("/v1/rerank", {"query": "Q", "documents": ["X", marked]}, {"documents.1.id"}),
        ("/v1/score", {"text_1": marked, "text_2": ["Q", marked]}, {"text_1.id", "text_2.1.id"}),
    ):
        answer = await stack.post(path, body)
        assert answer.status == 200, answer.body
        assert set(answer.headers[IGNORED].split(", ")) == names
    refused = await stack.post("/v1/rerank", {"query": "Q", "documents": [{"id": 7}]})
    assert (refused.status, refused.json()["error"]["param"]) == (400, "documents.0")


async def test_a_batch_takes_such_lines(start_stack: StartStack) -> None:
    stack = await start_stack(script(saying("ab")))
    async with openai.AsyncOpenAI(base_url=f"{stack.address}/v1", api_key="k", max_retries=0) as client:
        lines = [
            line("a", {"prompt": "x", "cache_prompt": True, "chat_id": "c"}),
            line("b", {"prompt": "x", "model": None}),
            line("c", {"prompt": "x", "frobnicate": 1}),
        ]
        batch = await ended(client, await started(client, lines))
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)
        told = await results(client, batch.output_file_id)
        assert {name: found["response"]["body"]["model"] for name, found in told.items()} == {
            "a": MODEL,
            "b": MODEL,
        }
        assert told["a"]["response"]["headers"] == {IGNORED: "chat_id, cache_prompt"}
        assert "headers" not in told["b"]["response"]


async def test_what_agents_send_by_default(start_stack: StartStack) -> None:
    """Codex's stock configuration, the OpenAI package's own names, and what LiteLLM's bridge adds."""
    stack = await start_stack(script(saying("ab"), model={"temperature": 0.6, "top_p": 0.95}))
    seen: list[httpx2.Response] = []

    async def keep(response: httpx2.Response) -> None:
        seen.append(response)

    hooks = {"response": [keep]}
    async with (
        httpx2.AsyncClient(event_hooks=hooks) as transport,
        openai.AsyncOpenAI(
            base_url=f"{stack.address}/v1", api_key="k", max_retries=0, http_client=transport
        ) as client,
    ):
        made = await client.responses.create(
            model=MODEL,
            instructions="You are a coding agent.",
            input=[{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
            tools=[
                {"type": "web_search"},
                {"type": "local_shell"},
                {"type": "custom", "name": "apply_patch", "format": {"type": "text"}},
            ],
            tool_choice="auto",
            parallel_tool_calls=True,
            reasoning={"summary": "auto"},
            store=False,
            include=["reasoning.encrypted_content"],
            prompt_cache_key="k",
            text={"verbosity": "low"},
            extra_body={"client_metadata": {"a": "b"}, "presence_penalty": 0.25},
        )
        assert made.output_text == "ab"
        assert set(seen[-1].headers[IGNORED].split(", ")) == {
            *("client_metadata", "include.0", "tools.0", "tools.1", "tools.2"),
            *("text.verbosity", "reasoning.summary"),
        }
        assert (made.temperature, made.top_p) == (0.6, 0.95)
        told = made.model_dump()
        assert (told["presence_penalty"], told["frequency_penalty"]) == (0.25, 0.0)
        assert (made.tools, made.tool_choice) == ([], "auto")
        assert made.reasoning is not None
        assert made.reasoning.summary == "auto"
        assert made.text is not None
        assert made.text.verbosity == "low"
        chat = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            reasoning_effort="high",
            store=True,
            top_logprobs=0,
            extra_body={"thinking": {"type": "enabled", "budget_tokens": 1024}},
        )
        assert chat.choices[0].message.content == "ab"
        assert set(seen[-1].headers[IGNORED].split(", ")) == {"store", "reasoning_effort", "thinking"}


@pytest.mark.parametrize("fields", [{}, {"background": True}])
async def test_the_sampling_that_was_used_is_in_every_event(
    start_stack: StartStack, run_dir: Path, fields: dict[str, Any]
) -> None:
    stack = await start_stack(
        script(saying("ab"), model={"temperature": 0.6, "top_p": 0.95}), state_dir=run_dir / "state"
    )
    body = {"input": "hi", "stream": True, "frequency_penalty": -0.5, "top_p": 0, **fields}
    events = events_of(await stack.post(RESPONSES, body))
    told = [event["response"] for event in events if "response" in event]
    assert len(told) >= 3
    stored = (await stack.get(f"{RESPONSES}/{told[0]['id']}")).json()
    for response in (*told, stored):
        assert {name: response[name] for name in ("temperature", "top_p")} == {"temperature": 0.6, "top_p": 0}
        assert (response["presence_penalty"], response["frequency_penalty"]) == (0.0, -0.5)


async def test_a_conversation_with_labels_goes_on_without_an_input(start_stack: StartStack) -> None:
    stack = await start_stack(script(saying("ab")))
    said = {"type": "message", "role": "assistant", "phase": "final_answer", "content": "x"}
    first = await stack.post(RESPONSES, {"input": [USER, said, USER]})
    assert first.status == 200, first.body
    items = (await stack.get(f"{RESPONSES}/{first.json()['id']}/input_items?order=asc")).json()["data"]
    assert [item.get("phase") for item in items] == [None, "final_answer", None]
    assert [set(item) >= {"phase"} for item in items] == [False, True, False]
    # A conversation goes on with nothing new; a request that says nothing at all is refused.
    empty: list[dict[str, Any]] = [{}, {"input": []}, {"input": None}]
    for nothing in empty:
        on = await stack.post(RESPONSES, {"previous_response_id": first.json()["id"], **nothing})
        assert on.status == 200, on.body
        assert (await stack.post(RESPONSES, {"instructions": "be", **nothing})).status == 200
        refused = await stack.post(RESPONSES, nothing)
        assert (refused.status, refused.json()["error"]["param"]) == (400, "input")
    read = await stack.get(f"{RESPONSES}/{first.json()['id']}?include=reasoning.encrypted_content")
    assert (read.status, read.headers[IGNORED]) == (200, "include")
