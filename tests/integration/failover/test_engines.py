"""An engine is lost at any moment of any kind of request: the answer is what it would have been anyway."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.support.cluster import Cluster
from tests.support.gateway import CHAT, COMPLETIONS, saying, script
from tests.support.http import Answer
from tests.support.stack_fixtures import StartCluster
from tests.support.waiting import eventually

RESPONSES = "/v1/responses"
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
USAGE = {"stream_options": {"include_usage": True}}
USER = {"messages": [{"role": "user", "content": "x"}]}
TOOLS = {**USER, "tools": [{"type": "function", "function": {"name": "now"}}]}
JSON = {"response_format": {"type": "json_object"}}
RESUMED = "catenary_resumed_sequences_total"
TOKENS = 24
MAX = {COMPLETIONS: "max_tokens", CHAT: "max_tokens", RESPONSES: "max_output_tokens"}

# Whatever has a rule of its own is told by its prompt: the others get a hash of all their tokens.
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (COMPLETIONS, {"prompt": "a", "temperature": 0, "seed": 1}),
    "seeded": (COMPLETIONS, {"prompt": "a", "temperature": 0.7, "seed": 11}),
    "streamed": (COMPLETIONS, {"prompt": "a", "seed": 11, "stream": True, **USAGE}),
    "chat": (CHAT, {**USER, "seed": 3}),
    "n": (COMPLETIONS, {"prompt": "a", "seed": 11, "n": 3}),
    "prompts": (COMPLETIONS, {"prompt": ["a", "bc"], "seed": 11, "n": 2, "stream": True, **USAGE}),
    "best_of": (COMPLETIONS, {"prompt": "a", "seed": 11, "n": 1, "best_of": 3}),
    "logprobs": (COMPLETIONS, {"prompt": "a", "seed": 11, "logprobs": 2, "echo": True}),
    "chat_logprobs": (CHAT, {**USER, "seed": 3, "logprobs": True, "top_logprobs": 2, "stream": True}),
    "min_tokens": (COMPLETIONS, {"prompt": "a", "seed": 5, "min_tokens": 20, "ignore_eos": True}),
    "json": (CHAT, {**USER, **JSON, "seed": 3}),
    "responses": (RESPONSES, {"input": "x", "seed": 3}),
    "responses_streamed": (RESPONSES, {"input": "x", "seed": 3, "stream": True}),
    "beams": (COMPLETIONS, {"prompt": "a", "use_beam_search": True, "n": 2, "seed": 1}),
}
TEXT = f"<think>so it is</think>hello world, hello\n{CALL}"
SCRIPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "stop": (COMPLETIONS, {"prompt": "a", "stop": ["wor"], "stream": True}),
    "held back": (COMPLETIONS, {"prompt": "a", "stop": ["world!"], "include_stop_str_in_output": True}),
    "end": (CHAT, {**USER, "stream": True, "stop": ["!"], "logprobs": True}),
    "tools": (CHAT, TOOLS),
    "tools streamed": (CHAT, {**TOOLS, "stream": True, **USAGE}),
    "reasoning": (RESPONSES, {"input": "x", "stream": True}),
}
_OWN = ("id", "created", "created_at", "completed_at", "item_id", "sequence_number", "call_id", "response_id")


_ONCE = ("role", "finish_reason", "object", "type", "name")


def without_names(value: Any) -> Any:
    """What two answers to one request have alike."""
    if isinstance(value, dict):
        return {key: without_names(item) for key, item in value.items() if key not in _OWN}
    return [without_names(item) for item in value] if isinstance(value, list) else value


def whole(answer: Answer) -> Any:
    """An answer, streamed or not, as one value: pieces of text are put together."""
    assert answer.status == 200, answer.body
    if answer.headers["content-type"] == "application/json":
        return without_names(answer.json())
    if b"event: " in answer.body:
        lines = answer.body.decode().split("\n")
        last = [json.loads(line[6:]) for line in lines if line.startswith("data: ")][-1]
        return without_names(last["response"])
    assert answer.events[-1] == "[DONE]"
    choices: dict[int, Any] = {}
    usage = None
    for event in answer.events[:-1]:
        assert "error" not in event, event
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            _add(choices.setdefault(choice["index"], {}), choice)
    return {"choices": choices, "usage": usage}


def _add(into: dict[str, Any], part: dict[str, Any]) -> None:
    """Texts and lists are joined, tool calls by their index; the last of everything else counts."""
    for key, value in part.items():
        if key in _OWN or value is None:
            continue
        if key == "tool_calls":
            calls = into.setdefault(key, {})
            for call in value:
                _add(calls.setdefault(call["index"], {}), call)
        elif isinstance(value, dict):
            _add(into.setdefault(key, {}), value)
        elif isinstance(value, (str, list)) and key not in _ONCE:
            into[key] = into.get(key, type(value)()) + without_names(value)
        else:
            into[key] = value


async def ask(cluster: Cluster, path: str, body: dict[str, Any]) -> Any:
    return whole(await cluster.post(path, {MAX[path]: TOKENS, **body}))


async def lose_each(cluster: Cluster, path: str, body: dict[str, Any], lengths: tuple[int, ...]) -> None:
    """The answer is the same when the engine that has the request dies after so many tokens."""
    expected = await ask(cluster, path, body)
    for length in lengths:
        # Whichever engine is given it dies, and whoever goes on with it does not.
        for engine in cluster.engines:
            engine.faults.crash_after_tokens = length
        answering = asyncio.create_task(ask(cluster, path, body))
        await died(cluster, answering)
        for engine in cluster.engines:
            engine.faults.crash_after_tokens = None
        assert await answering == expected, (path, body, length)
    await cluster.idle()


async def died(cluster: Cluster, answering: asyncio.Task[Any]) -> None:
    """Wait until an engine has died, or the answer is there."""

    def over() -> bool:
        hurt = any(engine.faults.crash_after_tokens is None for engine in cluster.engines)
        return hurt or answering.done()

    await eventually(over, "a crash")


async def test_a_lost_engine_changes_no_answer(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(script(step_delay_ms=1))
    for number, (path, body) in enumerate(REQUESTS.values()):
        resumed = await cluster.metric(RESUMED)
        await lose_each(cluster, path, body, ((1, 9)[number % 2], TOKENS - 1))
        assert await cluster.metric(RESUMED) >= resumed + 2


async def test_a_lost_engine_changes_nothing_that_is_read_in_a_text(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(script(saying(TEXT), step_delay_ms=1))
    for path, body in SCRIPTED.values():
        await lose_each(cluster, path, {MAX[path]: 400, **body}, (3, 29, 60))
    assert await cluster.metric(RESUMED) >= 2 * len(SCRIPTED)


async def test_before_the_first_token(start_cluster: StartCluster) -> None:
    cluster = await start_cluster()
    body = {"prompt": "a", "seed": 11, "n": 2, "logprobs": 1, "echo": True}
    expected = await ask(cluster, COMPLETIONS, body)
    for engine in cluster.engines:
        engine.faults.stall()
    answering = asyncio.create_task(ask(cluster, COMPLETIONS, body))
    await eventually(
        lambda: any(e.app.frontend.live_sequences == 2 for e in cluster.engines), "two at one engine"
    )
    for engine in cluster.engines:
        if engine.app.frontend.live_sequences:
            engine.faults.crash()
        engine.faults.resume()
    assert await answering == expected


async def test_a_stream_of_which_nothing_came_fails_with_a_status(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(engines=1, failover_wait_s=0.1)
    engine = cluster.engines[0]
    engine.faults.stall()
    bodies: list[tuple[str, dict[str, Any]]] = [
        (COMPLETIONS, {"prompt": "a"}),
        (CHAT, USER),
        (RESPONSES, {"input": "x"}),
    ]
    asked = [asyncio.create_task(cluster.post(path, {**body, "stream": True})) for path, body in bodies]
    await eventually(lambda: engine.app.frontend.live_sequences == len(bodies), "all of them at the engine")
    await engine.stop()
    for answer in await asyncio.gather(*asked):
        assert (answer.status, answer.json()["error"]["code"]) == (503, "engine_unavailable")
        assert "retry-after" in answer.headers
